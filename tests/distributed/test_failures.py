"""A failure on one rank ends the whole job, soon, with its name; a mistake costs one line and no traceback."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest

from tests.distributed.harness import Outcome, run_job

pytestmark = pytest.mark.distributed

SCRIPT = ["-m", "tests.distributed.job_that_fails"]
EXAMPLE = ["examples/mnist.py", "--device", "cpu"]
LAUNCHERS = ("horovodrun-mpi", "horovodrun-gloo", "torchrun")
# The bound on how long a job may outlive one of its ranks, beside the time that it takes to start.
BOUND_S = 30 + 20


def our_lines(outcome: Outcome) -> list[str]:
    return [line for line in outcome.output.splitlines() if "trainer: " in line and "tuned:" not in line]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_bug_on_one_rank_ends_the_job(launcher: str) -> None:
    outcome = run_job(launcher, 2, [*SCRIPT, "bug", "1"], timeout_s=100)
    assert outcome.code not in (0, 124), outcome.output
    assert outcome.seconds < BOUND_S
    assert "rank 1 on host" in outcome.output
    assert "ZeroDivisionError: the user's own bug" in outcome.output
    assert "Traceback" in outcome.output
    assert "the epoch ended" not in outcome.output


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_mistake_on_one_rank_ends_the_job_without_a_traceback(launcher: str) -> None:
    outcome = run_job(launcher, 2, [*SCRIPT, "mistake", "1"], timeout_s=100)
    assert outcome.code not in (0, 124), outcome.output
    assert outcome.seconds < BOUND_S
    assert any("rank 1 on host" in line and "sample 7" in line for line in our_lines(outcome)), outcome.output
    assert "job_that_fails.py" not in outcome.output.replace("job_that_fails.py FAILED", "")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_leaves_early_does_not_hang_the_others(launcher: str) -> None:
    outcome = run_job(launcher, 2, [*SCRIPT, "exit", "1"], timeout_s=100)
    assert outcome.code not in (0, 124), outcome.output
    assert outcome.seconds < BOUND_S


@pytest.mark.parametrize("strategy", ["ring", "parameter_server"])
@pytest.mark.parametrize("mishap", ["bug", "exit"])
def test_a_rank_that_fails_under_a_strategy_of_ours_ends_the_job(strategy: str, mishap: str) -> None:
    outcome = run_job("mpirun", 2, [*SCRIPT, mishap, "1", strategy], timeout_s=100)
    assert outcome.code not in (0, 124), outcome.output
    assert outcome.seconds < BOUND_S
    assert "the epoch ended" not in outcome.output
    assert ("ZeroDivisionError: the user's own bug" in outcome.output) == (mishap == "bug"), outcome.output


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_parameter_server_names_the_rank_that_hangs(launcher: str) -> None:
    script = [*SCRIPT, "hang", "1", "parameter_server"]
    outcome = run_job(launcher, 2, script, timeout_s=100, env={"TRAINER_TIMEOUT_S": "5"})
    assert outcome.code not in (0, 124), outcome.output
    assert outcome.seconds < BOUND_S
    assert any("rank 1 on host" in line and "did not bring their part" in line for line in our_lines(outcome))


@pytest.mark.parametrize("launcher", ["horovodrun-mpi", "torchrun"])
def test_a_loss_that_turns_nan_ends_the_job(launcher: str) -> None:
    outcome = run_job(launcher, 2, [*SCRIPT, "nan", "1"], timeout_s=100)
    assert outcome.code not in (0, 124), outcome.output
    assert any("the loss turned nan in epoch 1" in line for line in our_lines(outcome)), outcome.output
    assert "job_that_fails.py" not in outcome.output.replace("job_that_fails.py FAILED", "")


def test_a_hung_job_is_reported_with_every_ranks_stack() -> None:
    outcome = run_job("horovodrun-mpi", 2, [*SCRIPT, "hang", "1"], timeout_s=40)
    assert outcome.timed_out
    assert outcome.code != 0
    assert sorted(outcome.stacks) == ["stack-0", "stack-1"]
    assert "job_that_fails.py" in outcome.stacks["stack-1"]
    assert "synchronize" in outcome.stacks["stack-0"]


def write_mnist(folder: Path, *, train: int = 300, labels: int = 300) -> None:
    """A small data set in MNIST's own format."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, images, answers in (("train", train, labels), ("t10k", 100, 100)):
        pixels = bytes(i % 251 for i in range(images * 28 * 28))
        head = struct.pack(">4B3I", 0, 0, 8, 3, images, 28, 28)
        (raw / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + pixels))
        head = struct.pack(">4BI", 0, 0, 8, 1, answers)
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(head + bytes(i % 10 for i in range(answers)))


MISTAKES = {
    "strategy": (
        ["--strategy", "nope"],
        "strategy is 'nope'; valid are auto, single, horovod, ddp, ring, data_parallel, parameter_server",
    ),
    "dataset": (["--dataset", "nope"], "dataset is 'nope'; valid are auto, mnist, digits"),
    "precision": (["--precision", "fp8"], "precision is 'fp8'; valid are fp32, bf16, fp16"),
    "batch size": (["--batch-size", "0"], "batch_size is 0; it must be at least 1"),
    "epochs": (["--epochs", "-1"], "epochs is -1; it must be at least 1"),
    "wrong launcher": (["--strategy", "single"], "strategy 'single' trains alone"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_on_the_command_line_is_one_line(mistake: str, tmp_path: Path) -> None:
    write_mnist(tmp_path / "data")
    options, message = MISTAKES[mistake]
    output = tmp_path / "run"
    places = ["--data-dir", str(tmp_path / "data"), "--output", str(output)]
    outcome = run_job("horovodrun-mpi", 2, [*EXAMPLE, *places, *options])
    assert outcome.code not in (0, 124)
    assert len([line for line in our_lines(outcome) if message in line]) == 1, outcome.output
    assert "Traceback" not in outcome.output
    assert not output.exists()


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('hidden for this test')\n")
    outcome = run_job("mpirun", 2, [*EXAMPLE, "--dataset", "digits"], env={"PYTHONPATH": str(tmp_path)})
    assert outcome.code not in (0, 124)
    assert "strategy 'horovod' needs Horovod" in outcome.output
    assert "scripts/install/build_horovod.py" in outcome.output
    assert "Traceback" not in outcome.output


def test_mismatched_data_files_end_every_rank(tmp_path: Path) -> None:
    write_mnist(tmp_path, labels=299)
    outcome = run_job("horovodrun-gloo", 2, [*EXAMPLE, "--data-dir", str(tmp_path), "--output", str(tmp_path / "run")])
    assert outcome.code not in (0, 124)
    assert "holds 300 images, but" in outcome.output
    assert "Traceback" not in "\n".join(our_lines(outcome))
    assert not (tmp_path / "run").exists()


def test_an_output_folder_that_cannot_be_written_ends_every_rank(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "file").touch()
    output = tmp_path / "file" / "run"
    outcome = run_job("horovodrun-mpi", 2, [*EXAMPLE, "--data-dir", str(tmp_path), "--output", str(output)])
    assert outcome.code not in (0, 124)
    assert any(f"output folder {output} cannot be written" in line for line in our_lines(outcome)), outcome.output
    assert "Traceback" not in outcome.output


def test_horovod_under_torchrun_is_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    outcome = run_job("torchrun", 2, [*EXAMPLE, "--data-dir", str(tmp_path), "--strategy", "horovod"])
    assert outcome.code not in (0, 124)
    assert "strategy 'horovod' cannot join the ranks that torchrun started" in outcome.output
    assert 'examples/mnist.py", line' not in outcome.output

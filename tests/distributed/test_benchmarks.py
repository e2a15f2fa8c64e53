"""Each benchmark that starts jobs, in its shortest form: it ends well, and its report has the figures."""

from __future__ import annotations

import gzip
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.compare import decompress_mnist
from benchmarks.contestants import CONTESTANTS, ON_DDP, RunSettings, differing_losses, start
from benchmarks.time_to import read_result
from benchmarks.two_hosts import hosts
from benchmarks.workloads import TUTORIAL
from examples.datasets.mnist import FILES
from tests.distributed.harness import ROOT, run_job

WITH_HOROVOD = tuple(name for name in CONTESTANTS[TUTORIAL] if name not in ON_DDP)


def make_noise(folder: Path) -> RunSettings:
    """Write an MNIST of 800 images of noise below `folder`."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for part, samples in (("train", 800), ("test", 200)):
        images, labels = FILES[part]
        pixels = torch.randint(256, (samples, 28, 28), generator=generator, dtype=torch.uint8)
        digits = torch.randint(10, (samples,), generator=generator, dtype=torch.uint8)
        for name, head, values in (
            (images, struct.pack(">4I", 0x803, samples, 28, 28), pixels),
            (labels, struct.pack(">2I", 0x801, samples), digits),
        ):
            (raw / f"{name}.gz").write_bytes(gzip.compress(head + values.numpy().tobytes()))
    plain = folder / "plain"
    decompress_mnist(raw, plain)
    return RunSettings(data_dir=folder, plain_data_dir=plain, work_dir=folder, epochs=2, timeout_s=120)


@pytest.mark.parametrize(
    "names",
    [
        ("ours", "limit"),
        pytest.param(("ours", "ddp"), marks=pytest.mark.slow),
        pytest.param(("ours", "fabric", "accelerate"), marks=[pytest.mark.needs("peers"), pytest.mark.slow]),
        pytest.param(WITH_HOROVOD, marks=pytest.mark.slow),
    ],
)
def test_contestants_train_on_two_ranks(tmp_path: Path, names: tuple[str, ...]) -> None:
    """All exact contestants end with the same losses to the last bit; the limit does not."""
    settings = make_noise(tmp_path)
    runs = [start(TUTORIAL, name, 2, 0, settings) for name in names]
    for run in runs:
        assert run.report is not None, run.problem
        # Epoch lines round the seconds to hundredths, which tells few samples in little time only roughly.
        is_rounded = CONTESTANTS[TUTORIAL][run.contestant].rounded
        rounding = 1 + 800 * 0.005 / (run.report.seconds[-1] - 0.005) if is_rounded else 0
        assert run.report.samples[-1] == pytest.approx(800, abs=rounding)
        assert run.report.evaluated == 200
        assert run.problem is not None, "so few samples are not MNIST, and must not count"
    assert differing_losses(runs) == []
    losses = {run.contestant: run.report.losses for run in runs if run.report is not None}
    if "limit" in names:
        assert losses["limit"] != losses["ours"], "the limit exchanged its gradients"


@pytest.mark.slow
@pytest.mark.needs("root", "peers")
def test_contestants_train_on_two_hosts(tmp_path: Path) -> None:
    with hosts(tmp_path / "hosts") as two_hosts:
        settings = replace(make_noise(tmp_path), two_hosts=two_hosts)
        runs = [start(TUTORIAL, name, 4, 0, settings) for name in ("ours", "fabric")]  # which is told the hosts
    for one in runs:
        assert one.report is not None, one.problem
        assert one.report.samples == [800, 800]
    assert differing_losses(runs) == []


def benchmark(module: str, *arguments: str) -> str:
    """Run a benchmark as its page says, and return what it prints."""
    command = [sys.executable, "-m", f"benchmarks.{module}", "--repeats", "1", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_way_of_saving_is_measured() -> None:
    printed = benchmark("checkpoints", "--network", "tutorial", "--updates", "4")
    assert printed.count("| 1 | ") == 4


@pytest.mark.slow
def test_the_time_to_the_first_step_has_a_row() -> None:
    printed = benchmark("startup", "--dataset", "digits", "--only", "horovodrun, first step")
    (row,) = [line.split("|") for line in printed.splitlines() if line.startswith("| h")]
    ready, ended = (float(cell.split()[0]) for cell in row[2:4])
    assert 0 < ready <= ended


@pytest.mark.slow
def test_what_it_costs_ranks_to_join_is_measured() -> None:
    printed = benchmark("join", "--ranks", "2")
    assert [line for line in printed.splitlines() if line.startswith(("| torchrun | 2", "| horovodrun | 2"))]


@pytest.mark.slow
def test_a_training_ends_at_its_target() -> None:
    job = ["benchmarks/time_to_job.py", "language_model", "--settings", "sync_every=4", "--to", "7"]
    outcome = run_job("horovodrun-mpi", 2, job)
    assert outcome.code == 0, outcome.output
    result = read_result(outcome.output)
    assert result is not None, outcome.output
    assert result.reached == result.updates == 16  # at the first evaluation
    assert 2.0 < result.score <= 7.0
    assert result.seconds > 0

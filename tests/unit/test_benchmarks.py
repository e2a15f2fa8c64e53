"""Benchmarks: starting, reading and checking of runs, and that no process outlives one."""

from __future__ import annotations

import gzip
import json
import struct
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import accuracy, compare, launching
from benchmarks.common import REPORT_PREFIX
from benchmarks.contestants import CONTESTANTS, ON_DDP, Run, RunSettings, check, differing_losses, read_report, start
from benchmarks.workloads import TRANSFORMER, TUTORIAL, WORKLOADS, mnist_folder, scaled_learning_rate
from examples.datasets.mnist import FILES
from tests.unit.benchmark_runs import GOOD, make_run, report
from trainer.config import TrainerConfig
from trainer.errors import TrainerError
from trainer.files import check_writable
from trainer.loop.lr_schedule import make_schedule
from trainer.ops.processes import Finished


def finished(stdout: str) -> Finished:
    return Finished(code=0, stdout=stdout, stderr="", seconds=1.0)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"score": 0.5}, "test accuracy 50.00% is worse than test accuracy 90.00%"),
        ({"score": float("nan")}, "accuracy nan% is worse"),
        ({"samples": [60000, 59900]}, "trained on"),
        ({"evaluated": 5000}, "tested on 5000"),
        ({"seconds": [9.0]}, "did not report 2 epochs"),
    ],
)
def test_a_wrong_result_is_named(wrong: dict[str, object], word: str) -> None:
    problem = check(report(**wrong), WORKLOADS[TUTORIAL], 2, 2)
    assert problem is not None
    assert problem.startswith("WRONG")
    assert word in problem
    assert check(GOOD, WORKLOADS[TUTORIAL], 2, 2) is None


@pytest.mark.parametrize(("score", "good"), [(3.0, True), (8.0, False), (float("nan"), False)])
def test_a_transformers_score_is_a_loss(score: float, good: bool) -> None:
    workload = WORKLOADS[TRANSFORMER]
    found = report(score=score, samples=[workload.samples] * 2, evaluated=workload.test_samples)
    problem = check(found, workload, 2, 2)
    assert (problem is None) == good
    assert good or problem == f"WRONG: test loss {score:.2f} bits per byte is worse than test loss 4.50 bits per byte"


@pytest.mark.parametrize("network", WORKLOADS)
def test_an_epoch_is_a_whole_number_of_steps_on_up_to_eight_ranks(network: str) -> None:
    assert WORKLOADS[network].samples % (8 * WORKLOADS[network].batch_size) == 0


def test_the_transformers_text_is_as_long_as_an_epoch() -> None:
    workload = WORKLOADS[TRANSFORMER]
    train, test = workload.data(Path("unused"))
    assert (len(train), len(test)) == (workload.samples, workload.test_samples)
    targets = train.targets[:2]
    logits = workload.make(seed=0)(workload.prepare(train.inputs[:2])).detach()
    assert logits.shape == (*targets.shape, 256)
    score = workload.score(logits.flatten(0, 1), targets.flatten()).item() / targets.numel()
    assert score == pytest.approx(8, abs=0.5)  # bits per byte of a network that knows nothing


def test_more_ranks_take_too_few_updates_for_the_score() -> None:
    poor = {"score": 7.0, "samples": [WORKLOADS[TRANSFORMER].samples] * 2, "evaluated": 64}
    assert check(report(**poor), WORKLOADS[TRANSFORMER], 2, 2) is not None
    assert check(report(**poor), WORKLOADS[TRANSFORMER], 2, 8) is None
    problem = check(report(**poor, losses=[1.0, float("nan")]), WORKLOADS[TRANSFORMER], 2, 8)
    assert problem == "WRONG: the training losses are [1.0, nan], and do not fall"


def test_rounded_reports_may_be_off_by_a_percent() -> None:
    roughly = report(samples=[60000, 59500])
    assert check(roughly, WORKLOADS[TUTORIAL], 2, 2, rounded=True) is None
    assert check(roughly, WORKLOADS[TUTORIAL], 2, 2) is not None


def test_only_the_plain_example_and_the_limit_may_have_other_losses() -> None:
    assert [name for name, one in CONTESTANTS[TUTORIAL].items() if not one.same_losses] == ["plain", "limit"]
    assert [name for name, one in CONTESTANTS[TRANSFORMER].items() if not one.same_losses] == ["limit"]
    assert [name for named in CONTESTANTS.values() for name, one in named.items() if one.rounded] == ["plain"]


def test_exact_contestants_must_share_their_losses() -> None:
    assert differing_losses([make_run("ours", 2, 0, 1.0), make_run("tuned", 2, 0, 2.0)]) == []
    other = Run(
        contestant="tuned", ranks=2, round=0, command=[], report=report(losses=[1.0, 0.5 + 2**-53]), problem=None
    )
    (difference,) = differing_losses([make_run("ours", 2, 0, 1.0), other])
    assert "tuned and ours on 2 ranks" in difference
    elsewhere = Run(
        network=TRANSFORMER, contestant="tuned", ranks=2, round=0, command=[], report=report(losses=[2.0, 1.0]),
        problem=None,
    )  # fmt: skip
    assert differing_losses([make_run("ours", 2, 0, 1.0), elsewhere]) == []
    four = [make_run("ours", 4, 0, 1.0), replace(make_run("ddp", 4, 0, 1.0), report=report(losses=[1.0, 0.5002]))]
    assert differing_losses(four) == []  # of sums in another order
    (difference,) = differing_losses([four[0], replace(four[1], report=report(losses=[1.0, 0.51]))])
    assert "ddp and ours on 4 ranks" in difference
    for name in ("plain", "limit"):
        free = Run(contestant=name, ranks=2, round=0, command=[], report=report(losses=[2.0, 1.0]), problem=None)
        assert differing_losses([make_run("ours", 2, 0, 1.0), free]) == []


def test_reports_are_read_from_their_line_their_record_and_their_epoch_lines(tmp_path: Path) -> None:
    line = f"noise\n{REPORT_PREFIX}{json.dumps(vars(GOOD))}\n"
    assert read_report(finished(line), None) == GOOD

    epochs = (
        "epoch 1/2: loss 1.1276, validation loss 0.2337, accuracy 93.08 %, evaluated 10000/10000, "
        "12.00 s (5,000 samples/s)\n"
        "epoch 2/2: loss 0.5000, validation loss 0.1, accuracy 95.00 %, evaluated 10000/10000, "
        "4.00 s (15,000 samples/s)"
    )
    assert read_report(finished(epochs), None) == report(seconds=[12.0, 4.0], losses=[1.1276, 0.5])

    validation = {"metrics": {"accuracy": 0.95, "loss": 0.1}, "evaluated": 10000, "samples": 10000}
    entries = [{"seconds": 9.0, "train_loss": 1.0}, {"seconds": 4.0, "train_loss": 0.5}]
    lines = [json.dumps({**entry, "samples": 60000, "validation": validation}) for entry in entries]
    (tmp_path / "epochs.jsonl").write_text("\n".join(lines) + "\n")
    assert read_report(finished(""), tmp_path) == GOOD
    assert read_report(finished(line), tmp_path / "nothing") is None  # of one that writes a record


def test_the_loops_learning_rate_is_the_librarys() -> None:
    config = TrainerConfig(decay="none")
    schedule = make_schedule(config, world_size=2, updates_per_epoch=300, epochs=2)
    rates = [0.01 * schedule.factor(update) for update in range(600)]
    assert rates == [scaled_learning_rate(update, 300, 2) for update in range(600)]


def test_a_run_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    done = launching.run([sys.executable, "-c", script], timeout_s=3.0)
    assert done.code is None
    assert done.problem is not None
    assert done.problem.startswith("killed after")
    pid = int(pid_file.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_run_does_not_see_the_users_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "0.1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    script = "import os; print(os.environ.get('HOROVOD_CYCLE_TIME'), os.environ.get('OMP_NUM_THREADS'))"
    assert launching.run([sys.executable, "-c", script], timeout_s=60, threads=1).stdout == "None 1\n"


def test_a_failed_run_says_why() -> None:
    done = launching.run([sys.executable, "-c", "raise SystemExit('no such thing')"], timeout_s=60)
    assert done.problem == "exit code 1: no such thing"


def test_the_accuracy_table() -> None:
    assert accuracy.read_accuracy("epoch\ntest accuracy 99.12 % (evaluated 10000/10000)\n") == (99.12, None)
    assert accuracy.read_accuracy("nothing")[1] == "it printed no test accuracy"
    assert accuracy.read_accuracy("test accuracy 99.12 % (evaluated 9999/10000)")[1] is not None
    outcomes = [accuracy.Outcome(np=1, seed=seed, percent=99.0 + seed / 10, seconds=1.0) for seed in (0, 1)]
    outcomes += [accuracy.Outcome(np=2, seed=0, percent=None, seconds=1.0, problem="exit code 1")]
    assert [line.split() for line in accuracy.render(outcomes).splitlines()] == [
        ["processes", "seed", "0", "seed", "1", "least"],
        ["1", "99.00", "99.10", "99.00"],
        ["2", "FAILED", "FAILED", "FAILED"],
    ]


def test_peers_that_are_not_installed_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "has_peers", lambda: False)
    assert compare.parse_args(["--only", "ddp", "accelerate"]).only == ["ddp"]
    assert "without accelerate, which `make bench`" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare.parse_args(["--only", "fabric"])
    assert "no contestant is left" in capsys.readouterr().err
    monkeypatch.setattr(compare, "has_peers", lambda: True)
    everything = compare.parse_args([])
    assert set(everything.only) == CONTESTANTS[TUTORIAL].keys()
    assert everything.networks == list(CONTESTANTS)
    assert compare.parse_args(["--only", "plain"]).networks == [TUTORIAL]
    with pytest.raises(SystemExit):
        compare.parse_args(["--only", "plain", "--networks", TRANSFORMER])
    assert "no contestant is left" in capsys.readouterr().err


def test_mistakes_give_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.parse_args(["--epochs", "1"])
    assert "must be at least 2, because the first one is discarded" in capsys.readouterr().err
    with pytest.raises(TrainerError, match="MNIST is not in"):
        mnist_folder(tmp_path)
    with pytest.raises(TrainerError, match="cannot be written: No such file"):
        check_writable(tmp_path / "nowhere" / "bench.json")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "names",
    [
        ("ours", "tuned", "limit"),
        pytest.param(("ddp", "fabric", "accelerate"), marks=pytest.mark.needs("peers")),
        pytest.param(tuple(name for name in CONTESTANTS[TUTORIAL] if name not in ON_DDP), marks=pytest.mark.slow),
    ],
)
def test_contestants_train_on_two_ranks(tmp_path: Path, names: tuple[str, ...]) -> None:
    """On a small MNIST of noise, all exact contestants end with the same losses to the last bit; the limit does not."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for part, samples in (("train", 800), ("test", 200)):
        images, labels = FILES[part]
        pixels = torch.randint(256, (samples, 28, 28), generator=generator, dtype=torch.uint8)
        digits = torch.randint(10, (samples,), generator=generator, dtype=torch.uint8)
        (raw / f"{images}.gz").write_bytes(
            gzip.compress(struct.pack(">4I", 0x803, samples, 28, 28) + pixels.numpy().tobytes())
        )
        (raw / f"{labels}.gz").write_bytes(gzip.compress(struct.pack(">2I", 0x801, samples) + digits.numpy().tobytes()))
    plain = tmp_path / "plain"
    compare.decompress_mnist(raw, plain)
    settings = RunSettings(data_dir=tmp_path, plain_data_dir=plain, work_dir=tmp_path, epochs=2, timeout_s=120)
    runs = [start(TUTORIAL, name, 2, 0, settings) for name in names]
    for one in runs:
        assert one.report is not None, one.problem
        # Epoch lines round the seconds to hundredths, which tells few samples in little time only roughly.
        rounding = (
            1 + 800 * 0.005 / (one.report.seconds[-1] - 0.005) if CONTESTANTS[TUTORIAL][one.contestant].rounded else 0
        )
        assert one.report.samples[-1] == pytest.approx(800, abs=rounding)
        assert one.report.evaluated == 200
        assert one.problem is not None, "so few samples are not MNIST, and must not count"
    assert differing_losses(runs) == []
    losses = {one.contestant: one.report.losses for one in runs if one.report is not None}
    if "limit" in names:
        assert losses["limit"] != losses["tuned"], "the limit exchanged its gradients"


@pytest.mark.distributed
@pytest.mark.parametrize(
    "names",
    [
        ("ours", "ddp"),
        pytest.param(("ours", "fabric", "accelerate"), marks=[pytest.mark.needs("peers"), pytest.mark.slow]),
        pytest.param(tuple(name for name in CONTESTANTS[TRANSFORMER] if name not in ON_DDP), marks=pytest.mark.slow),
    ],
)
def test_contestants_train_the_transformer_on_two_ranks(tmp_path: Path, names: tuple[str, ...]) -> None:
    settings = RunSettings(data_dir=tmp_path, plain_data_dir=tmp_path, work_dir=tmp_path, epochs=1, timeout_s=120)
    runs = [start(TRANSFORMER, name, 2, 0, settings) for name in names]
    workload = WORKLOADS[TRANSFORMER]
    losses = {}
    for one in runs:
        assert one.report is not None, one.problem
        assert (one.report.samples, one.report.evaluated) == ([workload.samples], workload.test_samples)
        losses[one.contestant] = one.report.losses
    assert differing_losses(runs) == []
    if "limit" in names:
        assert losses["limit"] != losses["ours"], "the limit exchanged its gradients"

"""Benchmarks: a wrong result does not count, what is compared is comparable, and each report has its figures."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest

from benchmarks import (
    accuracy,
    checkpoints,
    growth,
    launching,
    preemptions,
    recipes,
    results,
    startup,
    tables,
    updates_to,
)
from benchmarks.chaos_job import record_type
from benchmarks.chaos_records import Result, Start, problems_of, read_starts, recovery_s
from benchmarks.checkpoint_loop import Block
from benchmarks.common import REPORT_PREFIX, Report
from benchmarks.contestants import Run, check, differing_losses, read_report
from benchmarks.overhead import Overhead
from benchmarks.time_to import Training, _parse_args, read, render, write
from benchmarks.time_to_job import Result as TimeTo
from benchmarks.workloads import TRANSFORMER, TUTORIAL, WORKLOADS, scaled_learning_rate
from tests.unit.job_files import stand_in
from trainer.config import TrainerConfig
from trainer.errors import ConfigError, TrainerError
from trainer.loop.lr_schedule import make_schedule
from trainer.ops.processes import Finished

GOOD = Report(seconds=[9.0, 4.0], losses=[1.0, 0.5], samples=[60000, 60000], score=0.95, evaluated=10000)


def make_run(contestant: str, ranks: int, number: int, seconds: float, **changes: Any) -> Run:
    """A run of round `number` whose second epoch took so many seconds."""
    report = replace(GOOD, seconds=[99.0, seconds], **changes)
    return Run(contestant=contestant, ranks=ranks, round=number, command=[], report=report, problem=None)


def make_rounds(**seconds: list[float]) -> list[Run]:
    """Runs of `contestant_ranks=[seconds of each round]`."""
    return [
        make_run(key[:-2], int(key[-1]), number, value)
        for key, values in seconds.items()
        for number, value in enumerate(values)
    ]


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
def test_a_wrong_result_is_named(wrong: dict[str, Any], word: str) -> None:
    problem = check(replace(GOOD, **wrong), WORKLOADS[TUTORIAL], 2, 2)
    assert problem is not None
    assert problem.startswith("WRONG")
    assert word in problem
    assert check(GOOD, WORKLOADS[TUTORIAL], 2, 2) is None


def test_a_transformers_score_is_a_loss_and_its_losses_fall() -> None:
    workload = WORKLOADS[TRANSFORMER]
    report = replace(GOOD, score=3.0, samples=[workload.samples] * 2, evaluated=workload.test_samples)
    assert check(report, workload, 2, 2) is None
    worse = "WRONG: test loss 8.00 bits per byte is worse than test loss 4.50 bits per byte"
    assert check(replace(report, score=8.0), workload, 2, 2) == worse
    falling = "WRONG: the training losses are [1.0, nan], and do not fall"
    assert check(replace(report, losses=[1.0, float("nan")]), workload, 2, 8) == falling


def test_exact_contestants_must_share_their_losses() -> None:
    ours, other = make_run("ours", 2, 0, 1.0), make_run("tuned", 2, 0, 2.0, losses=[1.0, 0.5 + 2**-53])
    assert differing_losses([ours, replace(other, report=GOOD)]) == []
    (difference,) = differing_losses([ours, other])
    assert "tuned and ours on 2 ranks" in difference
    assert differing_losses([ours, make_run("limit", 2, 0, 1.0, losses=[2.0, 1.0])]) == []
    four = make_run("ours", 4, 0, 1.0)
    assert differing_losses([four, make_run("ddp", 4, 0, 1.0, losses=[1.0, 0.5002])]) == []  # of sums in another order
    assert len(differing_losses([four, make_run("ddp", 4, 0, 1.0, losses=[1.0, 0.51])])) == 1


@pytest.mark.parametrize("network", WORKLOADS)
def test_an_epoch_is_a_whole_number_of_steps_on_up_to_eight_ranks(network: str) -> None:
    assert WORKLOADS[network].samples % (8 * WORKLOADS[network].batch_size) == 0


def test_the_loops_learning_rate_is_the_librarys() -> None:
    schedule = make_schedule(TrainerConfig(decay="none"), world_size=2, updates_per_epoch=300, epochs=2)
    rates = [0.01 * schedule.factor(update) for update in range(600)]
    assert rates == [scaled_learning_rate(update, 300, 2) for update in range(600)]


def test_reports_are_read_from_their_line_their_epoch_lines_and_their_record(tmp_path: Path) -> None:
    def finished(stdout: str) -> Finished:
        return Finished(code=0, stdout=stdout, stderr="", seconds=1.0)

    line = f"noise\n{REPORT_PREFIX}{json.dumps(vars(GOOD))}\n"
    assert read_report(finished(line), None) == GOOD
    epochs = (
        "epoch 1/2: loss 1.0000, validation loss 0.2, accuracy 93.08 %, evaluated 10000/10000, 9.00 s (5,000 samples/s)"
        "\nepoch 2/2: loss 0.5000, validation loss 0.1, accuracy 95.00 %, evaluated 10000/10000, 4.00 s "
        "(15,000 samples/s)"
    )
    assert read_report(finished(epochs), None) == replace(GOOD, samples=[45000, 60000])
    validation = {"metrics": {"accuracy": 0.95, "loss": 0.1}, "evaluated": 10000, "samples": 10000}
    entries = [{"seconds": 9.0, "train_loss": 1.0}, {"seconds": 4.0, "train_loss": 0.5}]
    lines = [json.dumps({**entry, "samples": 60000, "validation": validation}) for entry in entries]
    (tmp_path / "epochs.jsonl").write_text("\n".join(lines) + "\n")
    assert read_report(finished(""), tmp_path) == GOOD


@pytest.mark.distributed
def test_a_run_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    done = launching.run([sys.executable, "-c", script], timeout_s=3.0)
    assert (done.problem or "").startswith("killed after")
    pid = int(pid_file.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_run_does_not_see_the_users_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "0.1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    script = "import os; print(os.environ.get('HOROVOD_CYCLE_TIME'), os.environ.get('OMP_NUM_THREADS'))"
    assert launching.run([sys.executable, "-c", script], timeout_s=60, threads=1).stdout == "None 1\n"


def test_ratios_are_taken_round_by_round_and_the_limit_is_that_of_ranks_side_by_side() -> None:
    # The machine was four times slower in round 1, for both: the ratio of the medians would be 3.5.
    runs = make_rounds(ours_2=[2.0, 8.0, 2.0], plain_2=[6.0, 24.0, 7.0], limit_2=[1.0, 4.0, 1.0], limit_1=[2.0] * 3)
    assert results.paired_ratios(runs, ("plain", 2), ("ours", 2)) == [3.0, 3.0, 3.5]
    ours = next(row for row in results.make_rows(runs) if row.contestant == "ours")
    assert (ours.median_s, ours.least_s, ours.most_s, ours.per_s, ours.times_ours) == (2, 2, 8, 30000, 1)
    assert ours.percent_of_limit == results.Spread(median=50.0, low=50.0, high=50.0, rounds=3)
    assert "50.0" in tables.render_rows([ours], "images/s")
    (limit,) = results.make_limits(runs)
    assert (limit.ranks, limit.side_by_side_s, limit.alone_s) == (2, 1.0, 1.0)
    failed = replace(runs[0], problem="killed after 300 s")
    assert results.paired_ratios([failed, *runs[3:4]], ("plain", 2), ("ours", 2)) == []


@pytest.mark.parametrize(
    ("peers", "ours", "cores", "verdict"),
    [
        ({"limit_2": [3.8] * 3}, [4.0, 4.0, 4.0], 2, "met"),  # 95 %
        ({"limit_2": [3.8] * 3}, [4.0, 4.1, 4.1], 2, "MISSED"),
        ({"limit_2": [3.8] * 3}, [4.1, 4.1, 4.1], 1, "not judged: 2 ranks share 1 core"),
        ({"ddp_2": [10.0] * 3}, [9.0, 10.0, 10.0], 2, "met"),
        ({"ddp_2": [10.0] * 3}, [10.1, 10.2, 9.9], 2, "met within the noise"),  # one of three rounds disagrees
        ({"ddp_2": [10.0] * 3}, [10.1, 10.2, 10.1], 2, "MISSED"),
        ({"ddp_2": [10.0] * 2}, [10.1, 10.2], 2, "not judged: fewer than 3 rounds"),
    ],
)
def test_ours_is_judged_by_the_limit_and_by_its_peers(
    peers: dict[str, list[float]], ours: list[float], cores: int, verdict: str
) -> None:
    targets = results.make_targets(make_rounds(**peers, ours_2=ours), [], cores)
    assert tables.render_targets(targets).splitlines()[0].endswith(f")  {verdict}")


def test_the_cost_of_our_layer_has_a_target_on_one_rank() -> None:
    cheap = Overhead(ranks=1, median_us=20.0, low_us=1, high_us=30, ours_us=200, by_hand_us=190, pairs=10, steps=50)
    targets = results.make_targets([], [cheap, replace(cheap, median_us=20.1), replace(cheap, ranks=2)], cores=2)
    assert [(target.value, target.met) for target in targets] == [(20.0, True), (20.1, False)]


def test_reports_have_their_figures() -> None:
    """One row of the accuracy, the recipes, the updates, the starts and the checkpoints."""
    assert accuracy.read_accuracy("epoch\ntest accuracy 99.12 % (evaluated 10000/10000)\n") == (99.12, None)
    assert accuracy.read_accuracy("test accuracy 99.12 % (evaluated 9999/10000)")[1] is not None
    assert "99.10" in accuracy.render([accuracy.Outcome(np=1, seed=0, percent=99.1, seconds=1.0)])
    epochs = [(4.0, 0.98), (3.0, 0.99), (2.0, 0.985)]
    lines = [json.dumps({"seconds": s, "validation": {"metrics": {"accuracy": right}}}) for s, right in epochs]
    outcome = recipes.read_outcome("\n".join(lines))
    assert outcome == recipes.Outcome(seconds=7.0, total_s=9.0, percent=98.5)
    assert "| 1 of 1 | 7.0 " in recipes.render({"default": [outcome]})
    counted = [updates_to.Outcome(updates=320, percent=98.0), updates_to.Outcome(updates=None, percent=97.5)]
    assert "| sync_every=8 | 320 (320–320) | 97.75 (97.50–98.00) | 1 |" in updates_to.render(
        {"sync_every=8": counted}, 98
    )
    printed = "startup-began: 100.5\nstartup-ready: 103.0\nstartup-ready: 102.0\nstartup-ended: 104.5\n"
    assert startup.read_start(printed) == startup.Start(ready_s=2.5, ended_s=4.0)
    none = Block(saver="none", round=0, seconds=2.0, stalls_s=[], writes_s=[], update_s=0.1, meanwhile_s=None)
    ours = replace(none, saver="ours", seconds=2.5, stalls_s=[0.01], writes_s=[0.1])
    (_, row) = checkpoints.make_rows(1, [none, ours], samples=1000)
    assert row.samples_per_s == 400
    assert row.overhead_percent == pytest.approx(25.0)
    assert "+25.0 %" in checkpoints.table([row])


def test_times_to_a_target_are_read_as_written_and_missed_ones_are_told() -> None:
    training = Training(link="100mbit", network="mnist", setting="sync_every=8", seed=0, target=98.0)
    reached = TimeTo(updates=288, reached=288, seconds=1960.04, score=98.04, per_s=2119.6)
    measured = {training: reached, replace(training, seed=1): replace(reached, reached=None)}
    assert read(write(measured)) == measured
    assert "| 1,960.0 | 288, not in 288 |" in render(measured)
    with pytest.raises(TrainerError, match="has no results of"):
        read("no JSON")
    with pytest.raises(ConfigError, match="--only has 'isdn'; valid are unlimited, 1gbit, 100mbit, 20ms"):
        _parse_args(["--only", "isdn"])


def write_records(folder: Path, start: str, rank: int, at: float, updates: Sequence[tuple[int, list[int]]]) -> None:
    """Write the chaos job's records of one of two ranks, an update every half second from `at` on."""
    records = [(at + number / 2, update, samples) for number, (update, samples) in enumerate(updates)]
    (folder / f"{start}-{rank}-2-2").write_bytes(numpy.array(records, record_type(2)).tobytes())


def test_samples_that_a_killed_training_lost_or_trained_twice_are_counted(tmp_path: Path) -> None:
    """Two epochs of two updates: the first start is killed in update 3, and its last checkpoint has 2."""
    write_records(tmp_path, "one", 0, 100, [(1, [0, 1]), (2, [4, 5]), (3, [0, 2])])
    write_records(tmp_path, "one", 1, 100, [(1, [2, 3]), (2, [6, -1])])
    write_records(tmp_path, "two", 0, 120, [(3, [0, 2]), (4, [1, 3])])
    write_records(tmp_path, "two", 1, 120, [(3, [4, 6]), (4, [5, -1])])
    result = Result((("one", 0), ("two", 2)), accuracy=99.0, epochs=2, samples=7, updates_per_epoch=2)
    assert problems_of(result, read_starts(tmp_path)) == []
    assert recovery_s(103.0, read_starts(tmp_path)) == 17.0
    write_records(tmp_path, "two", 1, 120, [(3, [4, 6]), (4, [4, -1])])
    told = "epoch 2: 1 samples are missing, 1 were trained more than once"
    assert problems_of(result, read_starts(tmp_path)) == [told]


@pytest.mark.parametrize(("again", "delivered", "code"), [(9, 1, 0), (8, 1, 0), (7, 1, 1), (10, 1, 1), (9, 3, 1)])
def test_more_than_one_update_that_a_preemption_lost_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: int, delivered: int, code: int
) -> None:
    def start(first: int, last: int) -> Start:
        records = numpy.array([(0.0, number, [0]) for number in range(first, last + 1)], record_type(1))
        return Start("job", 1, (records,))

    monkeypatch.setattr(preemptions, "FOLDER", tmp_path)
    result = '{"lineage": [["job", 12]], "accuracy": 98, "epochs": 0, "samples": 1, "updates_per_epoch": 1}'
    (tmp_path / "result.json").write_text(result)
    assert preemptions.report([start(1, 8), start(again, 12)], delivered, 10.0, []) == code


def test_a_signal_that_slurm_has_not_taken_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, "scontrol", "echo JobState=RUNNING Restarts=9")
    stand_in(tmp_path, "scancel", "[ ! -e once ] && touch once")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    assert preemptions.preempt("17", 3, 0.0, random.Random(0)) == 1


def test_the_growth_of_costs_is_told_with_its_exponent(capsys: pytest.CaptureFixture[str]) -> None:
    assert growth.exponent([64, 128, 256], [5.0, 3.0, 12.0]) == pytest.approx(2.0)
    assert growth.exponent([64, 128], [4.0, 0.0]) == 0.0
    sizes = ["--simulated", "4", "8", "--checkpoints", "1", "9", "--samples", "100", "2000000"]
    assert growth.main(["--only", "rendezvous", "checks", "sweep", "commit", "finding", "--repeats", "1", *sizes]) == 0
    printed = capsys.readouterr().out
    assert "| checks | 4 | 8 | exponent |" in printed
    assert "| messages | 4 | 4 | 0.0 |" in printed
    assert "| lost | 0 | 0 | 0.0 |" in printed
    assert "| finding | 1 | 9 | exponent |" in printed

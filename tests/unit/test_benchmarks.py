"""Benchmarks: a wrong result does not count, and what is compared is comparable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from benchmarks import pictures, preemptions, results
from benchmarks.chaos_job import record_type
from benchmarks.chaos_records import Result, Start, problems_of, read_starts
from benchmarks.common import Report
from benchmarks.contestants import Run, check, differing_losses
from benchmarks.workloads import TUTORIAL, WORKLOADS, scaled_learning_rate
from trainer.config import TrainerConfig
from trainer.loop.lr_schedule import make_schedule

GOOD = Report(seconds=[9.0, 4.0], losses=[1.0, 0.5], samples=[60000, 60000], score=0.95, evaluated=10000)


def make_run(contestant: str, ranks: int, number: int, seconds: float, **changes: Any) -> Run:
    """A run of round `number` whose second epoch took so many seconds."""
    report = replace(GOOD, seconds=[99.0, seconds], **changes)
    return Run(contestant=contestant, ranks=ranks, round=number, command=[], report=report, problem=None)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"score": 0.5}, "test score 0.50 is worse than 0.90"),
        ({"score": float("nan")}, "score nan is worse"),
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


def test_exact_contestants_must_share_their_losses() -> None:
    ours, other = make_run("ours", 2, 0, 1.0), make_run("tuned", 2, 0, 2.0, losses=[1.0, 0.5 + 2**-53])
    assert differing_losses([ours, replace(other, report=GOOD)]) == []
    (difference,) = differing_losses([ours, other])
    assert "tuned and ours on 2 ranks" in difference
    assert differing_losses([ours, make_run("limit", 2, 0, 1.0, losses=[2.0, 1.0])]) == []
    four = make_run("ours", 4, 0, 1.0)
    assert differing_losses([four, make_run("ddp", 4, 0, 1.0, losses=[1.0, 0.5002])]) == []  # of sums in another order
    assert len(differing_losses([four, make_run("ddp", 4, 0, 1.0, losses=[1.0, 0.51])])) == 1


def test_the_table_is_that_of_the_page_of_results() -> None:
    seconds = {"ours": (2.0, 4.0), "tuned": (2.0, 2.0), "ddp": (4.0, 5.0), "limit": (1.0, 3.0)}
    runs = [make_run(name, 2, number, of[number]) for number in range(2) for name, of in seconds.items()]
    head, rule, row = results.table(runs).splitlines()
    assert f"\n{head}\n{rule}\n" in pictures.PAGE.read_text()
    peers = "2.00 Horovod by hand, tuned | 1.50 | 2.00 | 62 % | 4.50 DDP by hand"
    assert row == f"| tutorial, 2 ranks | 3.00 (2.00 – 4.00) | {peers} |"


def test_an_epochs_seconds_are_divided_by_what_the_thread_did() -> None:
    runs = [make_run("ddp", 2, number, 4.0, scheduled=of) for number, of in enumerate([(2.0, 1.0), (2.0, 1.5)])]
    runs.append(make_run("ours", 2, 0, 9.0))  # whose report is examples/mnist.py's record
    assert results.shares(runs).splitlines()[2:] == ["| tutorial, 2 × ddp | 2.00 | 1.25 | 0.75 |"]


def test_the_pictures_show_the_figures_of_the_page() -> None:
    drawn = pictures.of_page(pictures.PAGE.read_text())
    assert len(drawn) == 5
    assert {path: (pictures.PAGE.parent / path).read_text() for path in drawn} == drawn, "run benchmarks/pictures.py"


def test_the_loops_learning_rate_is_the_librarys() -> None:
    schedule = make_schedule(TrainerConfig(decay="none"), world_size=2, updates_per_epoch=300, epochs=2)
    rates = [0.01 * schedule.factor(update) for update in range(600)]
    assert rates == [scaled_learning_rate(update, 300, 2) for update in range(600)]


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

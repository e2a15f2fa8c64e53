"""What benchmarks/preemptions.py concludes from the records of its job."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy
import pytest

from benchmarks import preemptions
from benchmarks.chaos_job import record_type
from benchmarks.chaos_records import Start
from benchmarks.preemptions import lost_updates, preempt, report
from tests.unit.job_files import stand_in

RESULT = '{"lineage": [["job", 12]], "accuracy": 98, "epochs": 0, "samples": 1, "updates_per_epoch": 1}'


def start(first: int, *lasts: int) -> Start:
    """A start whose ranks have come from update `first` to these."""
    kind = record_type(1)
    return Start(
        "job", len(lasts), tuple(numpy.array([(0.0, n, [0]) for n in range(first, last + 1)], kind) for last in lasts)
    )


def test_updates_that_are_done_again_are_lost() -> None:
    assert lost_updates([start(1, 7, 8), start(9, 9, 9), start(9, 12, 12), start(13, 20, 20)]) == [0, 1, 0]


@pytest.mark.parametrize(("again", "code"), [(9, 0), (8, 0), (7, 1), (10, 1)])
def test_more_than_one_lost_update_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], again: int, code: int
) -> None:
    monkeypatch.setattr(preemptions, "FOLDER", tmp_path)
    (tmp_path / "result.json").write_text(RESULT)
    assert report([start(1, 8, 8), start(again, 12, 12)], 1, 10.0, []) == code
    shown = capsys.readouterr().out
    assert f"| preemptions | starts that trained | comparisons | lost {9 - again} |" in shown
    assert "| 1 | 2 | 1 | 1 |" in shown


@pytest.mark.parametrize(("delivered", "code"), [(2, 0), (3, 1), (0, 1)])
def test_preemptions_that_have_hit_no_training_prove_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], delivered: int, code: int
) -> None:
    monkeypatch.setattr(preemptions, "FOLDER", tmp_path)
    (tmp_path / "result.json").write_text(RESULT)
    assert report([start(1, 8, 8), start(9, 12, 12)], delivered, 10.0, []) == code
    assert (f"1 of {delivered} preemptions can be judged" in capsys.readouterr().out) == bool(code)


def test_a_signal_that_slurm_has_not_taken_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, "scontrol", "echo JobState=RUNNING Restarts=9")
    stand_in(tmp_path, "scancel", "[ ! -e once ] && touch once")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    assert preempt("17", 3, 0.0, random.Random(0)) == 1

"""What benchmarks/chaos.py concludes from the records of its job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest

from benchmarks.chaos_job import record_type
from benchmarks.chaos_records import Result, problems_of, read_starts, recovery_s, repeated_s, trained_s


def write(folder: Path, start: str, rank: int, at: float, updates: Sequence[tuple[int, list[int]]]) -> None:
    """Write the records of one of two ranks, an update every half second from `at` on."""
    records = [(at + number / 2, update, samples) for number, (update, samples) in enumerate(updates)]
    (folder / f"{start}-{rank}-2-2").write_bytes(numpy.array(records, record_type(2)).tobytes())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two epochs of two updates: the first start is killed in update 3, and its last checkpoint has 2."""
    write(tmp_path, "one", 0, 100, [(1, [0, 1]), (2, [4, 5]), (3, [0, 2])])
    write(tmp_path, "one", 1, 100, [(1, [2, 3]), (2, [6, -1])])
    write(tmp_path, "two", 0, 120, [(3, [0, 2]), (4, [1, 3])])
    write(tmp_path, "two", 1, 120, [(3, [4, 6]), (4, [5, -1])])
    return tmp_path


RESULT = Result((("one", 0), ("two", 2)), accuracy=99.0, epochs=2, samples=7, updates_per_epoch=2)


def test_each_sample_once_is_no_problem(folder: Path) -> None:
    assert problems_of(RESULT, read_starts(folder)) == []


def test_samples_that_are_missing_or_were_trained_twice_are_counted(folder: Path) -> None:
    write(folder, "two", 1, 120, [(3, [4, 6]), (4, [4, -1])])
    told = "epoch 2: 1 samples are missing, 1 were trained more than once"
    assert problems_of(RESULT, read_starts(folder)) == [told]
    (folder / "two-1-2-2").write_bytes(b"")  # a rank that wrote nothing
    assert problems_of(RESULT, read_starts(folder)) == ["epoch 2: 3 samples are missing, 0 were trained more than once"]


def test_times_are_those_of_rank_0(folder: Path) -> None:
    starts = read_starts(folder)
    assert [start.job for start in starts] == ["one", "two"]
    assert trained_s(starts) == 1.5
    assert repeated_s(RESULT.lineage, starts) == 0.0, "one update has no length"
    assert recovery_s(103.0, starts) == 17.0
    assert recovery_s(121.0, starts) is None

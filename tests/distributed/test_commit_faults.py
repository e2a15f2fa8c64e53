"""Checkpoints survive a process that is killed at any call, and a disk that fails: a short form of the trials."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks import commit_faults
from tests.faults.trials import Outcome, run

pytestmark = [pytest.mark.timeout(180), pytest.mark.needs("compiler")]


def test_no_fault_loses_a_checkpoint(tmp_path: Path) -> None:
    outcomes = list(run(tmp_path, every=4))
    problems = [f"{outcome.fault}, {outcome.detail}: {outcome.problems}" for outcome in outcomes if outcome.problems]
    assert not problems, "\n".join(problems)
    # Had the faults not reached the disk, every trial would find the new checkpoint.
    found = Counter((outcome.fault, outcome.newest) for outcome in outcomes)
    at_calls = {fault for fault, _ in found if " call" in fault}
    assert len(at_calls) == 8
    assert all(found[fault, 2] >= 3 and found[fault, 3] >= 3 for fault in at_calls)
    assert found["short write", 3] >= 3  # at least one in each file


def test_the_table_counts_what_was_found() -> None:
    outcomes = [
        Outcome(fault="killed", detail="", newest=3),
        Outcome(fault="killed", detail="", newest=2),
        Outcome(fault="killed", detail="", newest=2),
        Outcome(fault="killed", detail="", newest=3, problems=["holds something else"]),
    ]
    assert commit_faults.table(outcomes).splitlines()[2] == "| killed | 4 | 1 | 2 | 1 |"

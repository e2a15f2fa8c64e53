"""benchmarks/time_to_job.py on two ranks: the training ends at its target, with a result that time_to.py reads."""

from __future__ import annotations

import pytest

from benchmarks.time_to import read_result
from tests.distributed.harness import run_job

pytestmark = pytest.mark.distributed


def test_a_training_ends_at_its_target() -> None:
    command = [
        "benchmarks/time_to_job.py",
        "language_model",
        "--settings",
        "sync_every=4",
        "--to",
        "7",
        "--limit",
        "40",
    ]
    outcome = run_job("horovodrun-mpi", 2, command)
    assert outcome.code == 0, outcome.output
    result = read_result(outcome.output)
    assert result is not None, outcome.output
    assert result.reached == result.updates == 16  # at the first evaluation
    assert 2.0 < result.score <= 7.0
    assert result.seconds > 0

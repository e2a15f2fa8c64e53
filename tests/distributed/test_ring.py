"""What holds for the ring alone, in real jobs."""

from __future__ import annotations

from functools import cache

import pytest

from tests.distributed import checks_ring
from tests.distributed.harness import Checks, run_checks, run_job

CHECKS = [name for name in vars(checks_ring) if name.startswith("check_")]
pytestmark = pytest.mark.distributed
SCRIPT = ["examples/mnist.py", "--strategy", "ring", "--dataset", "digits", "--epochs", "1", "--output", "none"]


@cache
def job(launcher: str, ranks: int) -> Checks:
    return run_checks("tests.distributed.checks_ring", launcher, ranks, strategy="ring")


@pytest.mark.parametrize(("launcher", "ranks"), [("mpirun", 2), ("horovodrun-mpi", 3), ("horovodrun-mpi", 4)])
@pytest.mark.parametrize("check", CHECKS)
def test_ring(launcher: str, ranks: int, check: str) -> None:
    checks = job(launcher, ranks)
    outcomes = [report.get(check, f"did not get this far\n{checks.outcome.output}") for report in checks.by_rank]
    assert outcomes == ["passed"] * ranks, "\n".join(outcomes)


@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun-gloo"])
def test_ranks_that_mpi_did_not_start_are_refused_with_one_line(launcher: str) -> None:
    outcome = run_job(launcher, 2, SCRIPT)
    assert outcome.code != 0
    assert "strategy 'ring' speaks MPI, which did not start these processes: this is rank 0 of 2" in outcome.output
    assert 'Traceback (most recent call last):\n  File "examples/mnist.py' not in outcome.output


def test_alone_it_is_a_world_of_one() -> None:
    outcome = run_job("python", 1, SCRIPT)
    assert outcome.code == 0, outcome.output
    assert "ring all-reduce over MPI, rank 0 of 1" in outcome.output

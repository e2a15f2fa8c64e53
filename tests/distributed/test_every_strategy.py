"""The body of tests that every strategy passes, on 2, 3 and 4 ranks, through every launcher."""

from __future__ import annotations

from functools import cache

import pytest

from tests.distributed import checks_every_strategy
from tests.distributed.harness import Checks, run_checks

MODULE = "tests.distributed.checks_every_strategy"
CHECKS = [name for name in vars(checks_every_strategy) if name.startswith("check_")]
JOBS = [
    *[("auto", name, ranks) for name in ("horovodrun-mpi", "horovodrun-gloo", "torchrun") for ranks in (2, 3, 4)],
    ("auto", "mpirun", 2),
    *[("ddp", name, 2) for name in ("horovodrun-mpi", "horovodrun-gloo")],
    *[("ring", "horovodrun-mpi", ranks) for ranks in (2, 3, 4)],
    *[("parameter_server", "horovodrun-mpi", ranks) for ranks in (2, 3, 4)],
    *[("parameter_server", name, 2) for name in ("horovodrun-gloo", "torchrun", "mpirun")],
]


@cache
def job(strategy: str, launcher: str, ranks: int) -> Checks:
    return run_checks(MODULE, launcher, ranks, strategy=strategy)


@pytest.mark.distributed
@pytest.mark.parametrize(("strategy", "launcher", "ranks"), JOBS)
@pytest.mark.parametrize("check", CHECKS)
def test_strategy(strategy: str, launcher: str, ranks: int, check: str) -> None:
    checks = job(strategy, launcher, ranks)
    failures = [
        f"rank {rank}: {report.get(check, 'did not get this far')}"
        for rank, report in enumerate(checks.by_rank)
        if report.get(check) != "passed"
    ]
    if failures:
        stacks = [f"stack of {name}:\n{stack}" for name, stack in checks.outcome.stacks.items()]
        pytest.fail("\n".join([*failures, *stacks, checks.outcome.output[-2000:]]), pytrace=False)


@pytest.mark.distributed
@pytest.mark.parametrize(("strategy", "launcher", "ranks"), JOBS)
def test_job_ends_with_exit_code_0(strategy: str, launcher: str, ranks: int) -> None:
    outcome = job(strategy, launcher, ranks).outcome
    assert (outcome.code, outcome.timed_out) == (0, False), outcome.output[-3000:]

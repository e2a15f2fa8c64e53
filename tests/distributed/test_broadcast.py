"""Horovod's broadcasts of many tensors, in real jobs over MPI and over Gloo."""

from __future__ import annotations

from functools import cache

import pytest

from tests.distributed import checks_broadcast
from tests.distributed.harness import Checks, run_checks

CHECKS = [name for name in vars(checks_broadcast) if name.startswith("check_")]
pytestmark = pytest.mark.distributed


@cache
def job(launcher: str) -> Checks:
    return run_checks("tests.distributed.checks_broadcast", launcher, 2)


@pytest.mark.parametrize("launcher", ["horovodrun-mpi", "horovodrun-gloo"])
@pytest.mark.parametrize("check", CHECKS)
def test_broadcast(launcher: str, check: str) -> None:
    checks = job(launcher)
    assert checks.outcome.code == 0, checks.outcome.output
    assert [outcomes.get(check) for outcomes in checks.by_rank] == ["passed"] * 2, checks.outcome.output

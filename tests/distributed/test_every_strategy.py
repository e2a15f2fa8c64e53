"""The checks that every strategy passes, and each strategy's own, in the jobs of `jobs`."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.distributed.harness import run_job
from tests.distributed.jobs import JOBS, Job, run


def marks(job: Job) -> tuple[Any, ...]:
    is_older = job.strategy == "fsdp" and not hasattr(FSDPModule, "set_reduce_scatter_unused_params")
    needs = pytest.mark.skipif(is_older, reason="strategy 'fsdp' needs PyTorch 2.13")
    return (needs, pytest.mark.slow) if job.slow else (needs,)


CHECKS = [pytest.param(job, check, marks=marks(job), id=f"{job}-{check}") for job in JOBS for check in job.checks]


@pytest.mark.parametrize(("job", "check"), CHECKS)
def test_strategy(job: Job, check: str) -> None:
    checks = run(job)
    if checks.ended_by not in (None, check) and check not in checks.passed:
        pytest.skip(f"not run: {checks.ended_by} ended the job")
    if failures := checks.failures(check):
        pytest.fail("\n".join(failures), pytrace=False)


@pytest.mark.parametrize("job", [pytest.param(job, marks=marks(job), id=str(job)) for job in JOBS])
def test_job_runs_what_its_name_says_and_ends_with_exit_code_0(job: Job) -> None:
    outcome = run(job).outcome
    assert (outcome.code, outcome.timed_out) == (0, False), outcome.output[-3000:]
    descriptions = {
        "horovod": "Horovod over Gloo" if job.launcher == "horovodrun-gloo" else "Horovod over MPI",
        "ddp": "DDP over Gloo",
        "fsdp": "fully_shard over Gloo",
        "ring": "ring all-reduce over MPI",
        "parameter_server": "a parameter server over gRPC",
    }
    assert f"{descriptions[job.strategy]}, rank 0 of {job.ranks} on " in outcome.output


def test_a_ring_of_one_rank_trains() -> None:
    script = ["examples/mnist.py", "--strategy", "ring", "--dataset", "digits", "--epochs", "1", "--output", "none"]
    outcome = run_job("python", 1, script)
    assert outcome.code == 0, outcome.output
    assert "ring all-reduce over MPI, rank 0 of 1" in outcome.output

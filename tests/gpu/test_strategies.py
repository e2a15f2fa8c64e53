"""The proofs of exactness that run on CPUs in tests/distributed, on GPUs: on one rank, and on 2, 3 and 4.

Several ranks have a GPU each where there are as many. Else they share those that there are, if NCCL can.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.distributed.jobs import BIT_FOR_BIT, BROADCAST, NETWORKS, RING, TIMING, Job, run
from tests.gpu.machine import DEVICE, JOB_TIMEOUT_S, ON_GPU, has_package, need, share, transport

pytestmark = pytest.mark.timeout(JOB_TIMEOUT_S + 60)

JOBS = [
    Job("single", "python", 1, (NETWORKS,)),
    Job("horovod", "horovodrun-mpi", 1, (NETWORKS, BROADCAST)),
    Job("horovod", "horovodrun-mpi", 2, (NETWORKS, BIT_FOR_BIT, BROADCAST, TIMING)),
    Job("horovod", "horovodrun-mpi", 3),  # the other numbers' reciprocals are exact in 16 bits
    Job("horovod", "horovodrun-gloo", 4, (NETWORKS, BROADCAST)),
    Job("ddp", "torchrun", 2, (NETWORKS,)),
    Job("fsdp", "torchrun", 2, handle=()),
    Job("ring", "mpirun", 2, (RING,)),
    Job("parameter_server", "torchrun", 2),
]
# What modules of checks import, which a machine may lack.
PACKAGES = {NETWORKS: "torchvision", BROADCAST: "horovod", BIT_FOR_BIT: "horovod"}


def why_not(module: str, ranks: int) -> str:
    """Return why this machine cannot run a module of checks; an empty string where it can."""
    package = PACKAGES.get(module)
    if package is not None and not has_package(package):
        return f"there is no {package}"
    if module == TIMING and ON_GPU and torch.cuda.device_count() < ranks:
        return f"known delays are not found where {ranks} ranks take turns on one GPU"
    return ""


def possible(job: Job) -> Job:
    """Return the job without the checks that this machine cannot run."""
    return replace(job, own=tuple(module for module in job.own if not why_not(module, job.ranks)))


CHECKS = [pytest.param(possible(job), check, id=f"{job}-{check}") for job in JOBS for check in possible(job).checks]


def prepare(job: Job) -> dict[str, str]:
    """Return the job's environment; skip where this machine cannot run it."""
    need(job.strategy, job.launcher)
    return share(job.ranks)


@pytest.mark.parametrize("job", [possible(job) for job in JOBS], ids=str)
def test_job_runs_on_the_device_and_over_nccl(job: Job) -> None:
    env = prepare(job)
    outcome = run(job, DEVICE, JOB_TIMEOUT_S, **env).outcome
    assert (outcome.code, outcome.timed_out) == (0, False), outcome.output[-3000:]
    device = "cuda:0" if ON_GPU else "cpu"
    line = next(
        one for one in outcome.output.splitlines() if f"{transport(job.strategy, job.launcher)}rank 0 of" in one
    )
    assert f"rank 0 of {job.ranks} on " in line
    assert f"({device})" in line
    assert (f"{job.ranks} ranks share " in line) == bool(env)


@pytest.mark.parametrize(("job", "check"), CHECKS)
def test_strategy(job: Job, check: str) -> None:
    failures = run(job, DEVICE, JOB_TIMEOUT_S, **prepare(job)).failures(check)
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)

"""Hangs of ranks on GPUs: the verdict names the rank that keeps the others waiting, and the job ends.

Whoever waits for a collective over NCCL waits for the device, not in the call of the collective.
"""

from __future__ import annotations

import pytest

from benchmarks.hangs import STRATEGIES, run_trial
from tests.gpu.machine import DEVICE, need, share

pytestmark = pytest.mark.timeout(200)

RANKS = 3
"""Of a trial's job."""


@pytest.mark.parametrize("fault", ["sleeps", "stopped", "backward", "loader", "skips"])
@pytest.mark.parametrize("strategy", ["ddp", "horovod over MPI", "horovod over Gloo"])
def test_the_rank_that_keeps_the_others_waiting_is_named(strategy: str, fault: str) -> None:
    launcher, name = STRATEGIES[strategy]
    need(name, launcher)
    trial = run_trial(strategy, fault, 8.0, ("--device", DEVICE), share(RANKS))
    assert trial.code not in (0, None), trial.output
    # Transports that notice the fault by themselves end the job with an error, which names the rank as well.
    assert (trial.culprits or trial.blamed) == [1], trial.output
    assert trial.left == ()

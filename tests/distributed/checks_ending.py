"""The last check of a job: it leaves weights on their way, and the ranks then end one by one; see `worker`."""

from __future__ import annotations

import time
from typing import Any

import torch

from trainer import init
from trainer.strategies.base import Strategy

# As a script's own names are, until its process ends.
_KEPT: list[Any] = []


def check_a_job_may_end_while_weights_are_on_their_way(strategy: Strategy) -> None:
    """Without `average_weights`, on rank 0 at once and on the last rank later; the job's exit code tells the rest."""
    run = init(strategy, sync_every=2, full_updates=0, sync_overlap=True)
    module = torch.nn.Linear(4, 2)
    model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for _ in range(6):
        time.sleep(0.3 * run.rank / (run.world_size - 1))
        optimizer.zero_grad()
        run.backward(model(torch.randn(8, 4)).sum())
        optimizer.step()
    _KEPT.extend((run, model, optimizer))

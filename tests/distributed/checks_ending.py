"""The last check of a job: its ranks end one by one, each by itself; see `worker`."""

from __future__ import annotations

import time
from typing import Any

import torch

from trainer import init
from trainer.strategies.base import Strategy

# As a script's own names are, until its process ends.
_KEPT: list[Any] = []


def check_ranks_may_end_one_by_one(strategy: Strategy) -> None:
    """Rank 0 ends at once and the last rank later; the job's exit code tells the rest."""
    run = init(strategy)
    module = torch.nn.Linear(4, 2)
    model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        run.backward(model(torch.randn(8, 4)).sum())
        optimizer.step()
    time.sleep(run.rank / (run.world_size - 1))
    _KEPT.extend((run, model, optimizer))

"""A training loop of one's own whose last rank is slow to compute, and whose data are slow to come.

python job_that_is_timed.py STRATEGY SECONDS_OF_THE_SLOW_RANK SECONDS_OF_INPUT
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor
from torch.nn import functional as F

import trainer
from trainer import InMemory
from trainer.strategies.base import Strategy


def train(strategy: str | Strategy, slow_s: float, input_s: float) -> None:
    """Train for an epoch of 4000 samples, which a timed strategy may end earlier."""

    def late(inputs: Tensor) -> Tensor:
        time.sleep(input_s)
        return inputs

    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = trainer.init(strategy)
    torch.manual_seed(0)
    data = InMemory(torch.randn(4000, 8), torch.randint(4, (4000,)), late)
    model, optimizer = run.prepare(model, optimizer)
    loader = run.loader(data, 10)
    slow = run.rank == run.world_size - 1
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        time.sleep(slow_s if slow else 0)
        run.backward(loss)
        optimizer.step()


if __name__ == "__main__":
    train(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))

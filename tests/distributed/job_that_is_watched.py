"""Trains on two ranks for a few seconds, which print while they do; `test_terminal.py` looks at it."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.nn import functional as F

import trainer

EPOCHS, STEPS = 2, 60


def main() -> None:
    data = trainer.InMemory(torch.zeros(2 * STEPS, 4), torch.zeros(2 * STEPS, dtype=torch.long))
    model = torch.nn.Linear(4, 2)
    rank, steps = trainer.current_world().rank, 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        time.sleep(0.02)
        if steps % 20 == 0:
            print("rank", rank, "is at step", steps)
        return F.cross_entropy(outputs, targets)

    config = trainer.TrainerConfig(batch_size=1, device="cpu", log_every_s=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer.Trainer(model, optimizer, loss, config=config, output=None).fit(data, epochs=EPOCHS)


if __name__ == "__main__":
    main()

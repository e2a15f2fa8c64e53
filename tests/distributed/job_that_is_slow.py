"""A healthy training in which one rank does something slowly while the others wait: longer than the shortest limit."""

from __future__ import annotations

import io
import sys
import time

import torch
from torch.nn import functional as F

import trainer
from trainer.ops.watcher.limits import LEAST_S

SLOW_S = LEAST_S + 6


class SlowFile(io.BytesIO):
    """A file on a disk that takes its time."""

    def write(self, data: object) -> int:
        time.sleep(0.2)
        return super().write(data)  # type: ignore[arg-type]


def evaluate() -> None:
    """Compute by oneself, as where rank 0 alone evaluates."""
    end = time.monotonic() + SLOW_S
    while time.monotonic() < end:
        torch.randn(300, 300) @ torch.randn(300, 300)


def save() -> None:
    started = time.monotonic()
    while time.monotonic() < started + SLOW_S:
        torch.save({"weights": torch.randn(100)}, SlowFile())


def main() -> None:
    run = trainer.init(sys.argv[1], device="cpu")
    network = torch.nn.Linear(4, 2)
    model, optimizer = run.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    data = trainer.InMemory(torch.randn(400, 4), torch.randint(2, (400,)))
    for step, (inputs, targets) in enumerate(run.loader(data, 4)):
        run.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and run.rank == 1:
            time.sleep(SLOW_S)  # as in a slow first step, which compiles
        if step == 10 and run.rank == 0:
            evaluate()
        if step == 20 and run.rank == 0:
            save()
        time.sleep(0.01)
    run.print("trained to the end")
    run.close()


if __name__ == "__main__":
    main()

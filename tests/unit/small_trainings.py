"""Small trainings with checkpoints, in a world of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.unit.test_loader import numbered
from trainer import Checkpoints, Run, init
from trainer.checkpoint.disk.committed import find, load

made: list[Checkpoints] = []


def close_all() -> None:
    """Close what a test has started."""
    while made:
        made.pop().close()


def start(folder: Path, **options: Any) -> tuple[Run, nn.Module, torch.optim.Optimizer, Checkpoints]:
    """A model with momentum, so that its state tells how often it has stepped."""
    run, model = init("single"), nn.Linear(2, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    made.append(run.checkpoints(folder, **options))
    return run, model, optimizer, made[-1]


def step(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    run.backward(model(inputs).mean())
    optimizer.step()
    optimizer.zero_grad()


def saved(folder: Path) -> list[tuple[int, int, list[int]]]:
    """Return epoch, updates and the loaders' positions of each checkpoint, oldest first."""
    for checkpoints in made:
        checkpoints._storage.wait()
    manifests = [load(path).facts for path in reversed(find(folder))]
    return [(manifest["epoch"], manifest["updates"], manifest["taken"]) for manifest in manifests]


def train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int = 2, samples: int = 6) -> None:
    loader = run.loader(numbered(samples), 2)
    for _ in run.epochs(epochs):
        for inputs, _ in loader:
            step(run, model, optimizer, inputs)

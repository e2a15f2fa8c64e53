"""Contexts for callbacks that are called without a trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer import FitContext, TrainerConfig, World


def make_context(world: World, from_root: object = None) -> FitContext:
    """Return the context of a fit of two epochs, on which rank 0 broadcasts `from_root`."""

    def broadcast_object(value: Any) -> Any:
        return value if world.is_root else from_root

    model = nn.Linear(1, 1)
    return FitContext(
        learning_rate="learning rate 0.1, then constant",
        world=world,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        epochs=2,
        config=TrainerConfig(batch_size=7),
        strategy_name="Rank",
        description=str(world),
        tuning={"threads": "2 per rank"},
        broadcast_object=broadcast_object,
    )

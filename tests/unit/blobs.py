"""A small classification for the tests of `Trainer`, in a world of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from trainer import InMemory, Trainer, TrainerConfig

Loss = Callable[[Any, Any], Tensor]


def blobs(samples: int, dtype: torch.dtype = torch.float64) -> InMemory:
    """Points around three corners, and which corner."""
    generator = torch.Generator().manual_seed(3)
    targets = torch.arange(samples) % 3
    inputs = torch.randn(samples, 4, generator=generator, dtype=dtype)
    inputs[torch.arange(samples), targets] += 3
    return InMemory(inputs, targets)


def network(dtype: torch.dtype = torch.float64, *, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).to(dtype)


def make(model: nn.Module | None = None, loss: Loss = F.cross_entropy, lr: float = 0.1, **settings: Any) -> Trainer:
    """A trainer that neither prints nor writes, with a plain learning rate unless the test asks for more."""
    model = model or network()
    own = {name: settings.pop(name) for name in ("metrics", "callbacks", "output") if name in settings}
    plain = {"device": "cpu", "batch_size": 10, "scale_lr": False, "decay": "none"}
    return Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        loss,
        strategy="single",
        config=TrainerConfig(**{**plain, **settings}),
        progress=False,
        **{"output": None, **own},
    )


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def fitted(data: Dataset[Any], *, epochs: int = 2, **settings: Any) -> Tensor:
    trainer = make(**settings)
    trainer.fit(data, epochs=epochs)
    return weights(trainer)

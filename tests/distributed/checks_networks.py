"""Networks that nobody wrote for a test: the weights of one process, under every strategy.

Run on every rank of one job.

Their gradients are above 4 MiB, so the buckets are several.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import resnet18

from tests.distributed.checks_every_strategy import assert_equal_everywhere
from trainer import InMemory, init
from trainer.data.shard_plan import permutation
from trainer.strategies.base import Strategy

_CLASSES = 10
_PER_RANK = 4
_CLIP = 1.0


class Transformer(nn.Module):
    """An encoder over tokens, and a classifier of the mean."""

    def __init__(self) -> None:
        super().__init__()
        width = 128
        self.embedding = nn.Embedding(1000, width)
        layer = nn.TransformerEncoderLayer(width, 4, dim_feedforward=512, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embedding(tokens)).mean(1))
        return out


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The usual two groups: biases and norms without weight decay."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [one for one in parameters if one.ndim > 1], "weight_decay": 0.1},
            {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
        eps=1e-3,  # Adam divides by tiny gradients, which would show the rounding of their sums
    )


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)


def make_samples(inputs: Tensor) -> InMemory:
    generator = torch.Generator().manual_seed(1)
    return InMemory(inputs, torch.randint(_CLASSES, (len(inputs),), generator=generator))


def compare(strategy: Strategy, make: Callable[[], nn.Module], data: InMemory, *, accumulate: int = 1) -> None:
    """Two epochs with clipping and a schedule, on all ranks and by plain PyTorch in one process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().double()
    size = sum(one.numel() * one.element_size() for one in model.parameters())
    assert size > 4 * 2**20, f"{size} bytes of gradients"
    alone = copy.deepcopy(model)

    run = init(strategy, accumulate=accumulate, sync_batch_norm=True)
    forward, optimizer = run.prepare(model, adamw(model))
    scheduler = schedule(optimizer)
    loader = run.loader(data, _PER_RANK)
    for _ in run.epochs(2):
        for inputs, targets in loader:
            run.backward(F.cross_entropy(forward(inputs), targets))
            if run.sync_gradients:
                run.clip_grad_norm_(model, _CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    optimizer = adamw(alone)
    scheduler = schedule(optimizer)
    for epoch in range(2):
        for index in permutation(len(data), epoch=epoch, seed=0).split(_PER_RANK * strategy.world.size * accumulate):
            optimizer.zero_grad()
            F.cross_entropy(alone(data.inputs[index]), data.targets[index]).backward()
            nn.utils.clip_grad_norm_(alone.parameters(), _CLIP)
            optimizer.step()
            scheduler.step()
    assert_equal_everywhere(strategy, model, alone, 1e-10)


def images(samples: int) -> InMemory:
    generator = torch.Generator().manual_seed(0)
    return make_samples(torch.randn(samples, 3, 32, 32, generator=generator, dtype=torch.float64))


def check_resnet_18_with_global_batch_norm(strategy: Strategy) -> None:
    compare(strategy, lambda: resnet18(num_classes=_CLASSES), images(2 * _PER_RANK * strategy.world.size + 3))


def check_a_transformer_with_accumulation(strategy: Strategy) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1000, (5 * _PER_RANK * strategy.world.size + 1, 12), generator=generator)
    compare(strategy, Transformer, make_samples(tokens), accumulate=2)

"""Compression powersgd and PyTorch's own hook, side by side under ddp; see `jobs`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.checks_every_strategy import assert_equal_everywhere
from tests.distributed.reference import sgd
from trainer import init
from trainer.strategies.base import Strategy

RANK, FULL, STEPS = 2, 2, 8


def network() -> nn.Module:
    """Return a network with matrices of several shapes, small and large enough to be approximated."""
    torch.manual_seed(3)
    layers = (nn.Conv2d(1, 16, 3), nn.Tanh(), nn.Flatten(), nn.Linear(256, 20), nn.Tanh(), nn.Linear(20, 4))
    return nn.Sequential(*layers).double()


def batches(rank: int) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(rank)
    made = [torch.randn(6, 1, 6, 6, generator=generator, dtype=torch.float64) for _ in range(STEPS)]
    return [(inputs, inputs.flatten(1)[:, :4].argmax(1)) for inputs in made]


def by_the_hook(rank: int) -> nn.Module:
    """Train under DDP with the hook, in one bucket, as its documentation has it."""
    model = network()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=100)
    state = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=FULL)
    wrapped.register_comm_hook(state, powerSGD_hook)
    optimizer = sgd(model)
    for inputs, targets in batches(rank):
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(inputs), targets).backward()
        optimizer.step()
    return model


def first_factors(places: list[int], shapes: dict[int, torch.Size]) -> dict[int, torch.Tensor]:
    """Return the numbers that the hook begins with, drawn in the order of the bucket: from the last parameter on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
        return {place: torch.randn(1, *shapes[place], dtype=torch.float64)[0] for place in sorted(places, reverse=True)}


def check_powersgd_equals_pytorchs_hook(strategy: Strategy) -> None:
    expected = by_the_hook(strategy.world.rank)
    model = network()
    run = init(strategy, compression=f"powersgd:{RANK}", full_updates=FULL)
    wrapped, optimizer = run.prepare(model, sgd(model))
    factors = run._prepared.models[model]._power.factors  # type: ignore[attr-defined]
    assert len(factors) == 2  # the convolution's and the first linear layer's
    drawn = first_factors([*factors], {place: one.right.shape for place, one in factors.items()})
    for place, one in factors.items():
        one.right.copy_(drawn[place])
    for inputs, targets in batches(strategy.world.rank):
        optimizer.zero_grad()
        run.backward(nn.functional.cross_entropy(wrapped(inputs), targets))
        optimizer.step()
    assert_equal_everywhere(strategy, model, expected, 1e-10)

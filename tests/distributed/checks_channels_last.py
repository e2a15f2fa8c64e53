"""Weights in channels-last order, whose strides a transport could ignore; run on every rank of one job."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.checks_every_strategy import BATCH, assert_equal_everywhere
from tests.distributed.reference import sgd, train_alone
from trainer import ConfigError, InMemory, init
from trainer.strategies.base import Strategy

CLIP = 0.05


def make_network(*, seed: int = 1, batch_norm: bool = False) -> nn.Sequential:
    """Convolutions of several channels; with one channel both orders are the same."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 6, 2), nn.Flatten(), nn.Linear(54, 4)]
        layers[1:1] = [nn.BatchNorm2d(8)] if batch_norm else []
        return nn.Sequential(*layers).double().to(memory_format=torch.channels_last)


def make_images(samples: int) -> InMemory:
    generator = torch.Generator().manual_seed(samples)
    images = torch.randn(samples, 3, 6, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (samples,), generator=generator)
    return InMemory(images.contiguous(memory_format=torch.channels_last), labels)


def is_in_order(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def train(strategy: Strategy, data: InMemory, *, batch_norm: bool, **settings: Any) -> nn.Module:
    """Train as `train_alone` does, on all ranks; rank 0's weights count, so the broadcast is checked as well."""
    model = make_network(seed=1 + strategy.world.rank, batch_norm=batch_norm)
    weights = [layer.weight for layer in model if isinstance(layer, nn.Conv2d)]
    run = init(strategy, sync_batch_norm=batch_norm, **settings)
    forward, optimizer = run.prepare(model, sgd(model))
    loader = run.loader(data, BATCH)
    for _ in run.epochs(2):
        for inputs, targets in loader:
            run.backward(F.cross_entropy(forward(inputs), targets))
            if run.sync_gradients:
                run.clip_grad_norm_(model, CLIP)
                assert all(is_in_order(weight.grad) for weight in weights)
                optimizer.step()
                optimizer.zero_grad()
    assert all(is_in_order(weight) for weight in weights)
    return model


def check_channels_last_weights_equal_one_process(strategy: Strategy) -> None:
    every: list[dict[str, Any]] = [{"batch_norm": True}, {"accumulate": 2}]
    for settings in every:
        batch = BATCH * strategy.world.size * settings.get("accumulate", 1)
        options = {"batch_norm": False, **settings}
        data = make_images(3 * batch + 2)
        model = train(strategy, data, **options)
        alone = make_network(batch_norm=options["batch_norm"])
        assert_equal_everywhere(strategy, model, train_alone(alone, data, batch=batch, epochs=2, clip_norm=CLIP), 1e-11)


def check_an_order_that_differs_between_ranks_is_told(strategy: Strategy) -> None:
    if strategy.world.size == 1:
        return
    model = make_network()
    if strategy.world.rank == strategy.world.size - 1:
        model.to(memory_format=torch.contiguous_format)
    with pytest.raises(ConfigError, match=r"ranks disagree about parameter 0\.weight: .* strides \[27, 1, 9, 3\]"):
        init(strategy).prepare(model, sgd(model))

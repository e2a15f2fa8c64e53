"""Horovod's Adasum over MPI, run on every rank of one job; the number of ranks is a power of two.

Maleki et al., "Scaling distributed training with adaptive summation" (2020): parallel gradients are averaged,
orthogonal ones added.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.checks_every_strategy import BATCH, assert_same_on_all_ranks, make_trainer
from tests.distributed.reference import make_data, make_model, sgd
from trainer import init
from trainer.strategies.base import Strategy


def check_adasum_of_equal_steps_is_that_step(strategy: Strategy) -> None:
    model, alone = make_model(torch.float32), make_model(torch.float32)
    inputs, targets = (tensor[:BATCH] for tensor in (make_data(8, torch.float32).inputs, make_data(8).targets))
    run = init(strategy, reduction="adasum")
    wrapped, optimizer = run.prepare(model, sgd(model))
    by_itself = sgd(alone)
    run.backward(F.cross_entropy(wrapped(inputs), targets))
    F.cross_entropy(alone(inputs), targets).backward()
    optimizer.step()
    by_itself.step()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert_same_on_all_ranks(strategy, model)


def check_adasum_takes_channels_last_weights(strategy: Strategy) -> None:
    model, alone = (nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last) for _ in range(2))
    inputs = torch.arange(27.0).view(1, 3, 3, 3)
    run = init(strategy, reduction="adasum")
    wrapped, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    alone.load_state_dict(model.state_dict())  # rank 0's
    before = alone.weight.detach().clone()
    run.backward(wrapped(inputs).sum())
    optimizer.step()
    (gradient,) = torch.autograd.grad(alone(inputs).sum(), alone.weight)
    assert torch.allclose(model.weight, before - 0.1 * gradient, rtol=1e-5)
    assert model.weight.stride() == before.stride() == (12, 1, 6, 3)


def check_adasum_adds_orthogonal_steps(strategy: Strategy) -> None:
    rank, size = strategy.world.rank, strategy.world.size
    model = nn.Linear(size, 1, bias=False)
    nn.init.zeros_(model.weight)
    run = init(strategy, reduction="adasum")
    wrapped, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    # Each rank's gradient is a unit vector of its own.
    run.backward(wrapped(torch.eye(size)[rank]).sum())
    optimizer.step()
    assert torch.allclose(model.weight, torch.full((1, size), -0.5)), model.weight


def check_adasum_keeps_the_learning_rate(strategy: Strategy) -> None:
    data, model = make_data(4 * BATCH * strategy.world.size, torch.float32), make_model(torch.float32)
    trainer = make_trainer(strategy, model, reduction="adasum", accumulate=2, scale_lr=True)
    assert trainer.fit(data, epochs=1)[-1].learning_rate == 0.1
    assert_same_on_all_ranks(strategy, model)

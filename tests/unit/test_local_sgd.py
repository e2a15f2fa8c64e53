"""Local training: what ranks that are threads average, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.ranks_as_threads import Threads
from trainer import RunConfig
from trainer.strategies.base import Strategy
from trainer.strategies.compress.local_sgd import LocalSynchronizer

RANKS = 2
DIRECTIONS = torch.tensor([[1.0, -2.0, 0.5], [0.5, 3.0, -1.0]], dtype=torch.float64)


def network() -> nn.Module:
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1 + number, parameter.numel()).view_as(parameter))
    return model


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    value: Tensor = model(DIRECTIONS[rank] * (1 + step % 3)).square().sum()
    return value


def rounds(*, every: int, full_updates: int = 0, compression: str = "none") -> RunConfig:
    """Return the settings of rounds of local updates."""
    return RunConfig(sync_every=every, full_updates=full_updates, compression=compression)


class Rank:
    """One rank's training, as `Updates` does it."""

    def __init__(self, rank: int, strategy: Strategy, optimizer: Any = None, **options: Any) -> None:
        self.rank, self.model, self.steps = rank, network(), 0
        self.synchronizer = LocalSynchronizer(list(self.model.named_parameters()), strategy, rounds(**options))
        self.optimizer = (optimizer or sgd)(self.model)

    def train(self, steps: int, *, without_backward: bool = False) -> None:
        for _ in range(steps):
            if without_backward:
                self.optimizer.zero_grad()
                self.synchronizer.complete()
            else:
                self.backward()
            self.optimizer.step()
            self.synchronizer.after_step()
            self.steps += 1

    def backward(self) -> None:
        self.model.zero_grad()
        self.synchronizer.before_backward()
        loss(self.model, self.rank, self.steps).backward()
        self.synchronizer.after_backward()
        self.synchronizer.complete()

    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()]).clone()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def standing(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def by_hand(steps: int, every: int, full: int = 0) -> list[Tensor]:
    """Train both ranks' models in turns; return each rank's weights."""
    models = [network() for _ in range(RANKS)]
    optimizers = [sgd(model) for model in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
        if step < full:
            for grads in zip(*([p.grad for p in model.parameters()] for model in models), strict=True):
                mean = (grads[0] + grads[1]) / 2
                for gradient in grads:
                    gradient.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
        if step >= full and (step - full + 1) % every == 0:
            end_round(models)
    return [torch.cat([parameter.detach().flatten() for parameter in model.parameters()]) for model in models]


@torch.no_grad()
def end_round(models: list[nn.Module]) -> None:
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        mean = (parameters[0] + parameters[1]) / 2
        for parameter in parameters:
            parameter.copy_(mean)


@pytest.mark.parametrize(("every", "full"), [(1, 0), (3, 0), (4, 2), (5, 13)])
@pytest.mark.parametrize("steps", [11, 12])
def test_rounds_are_those_of_the_paper(every: int, full: int, steps: int) -> None:
    def job(rank: int, strategy: Strategy) -> Tensor:
        replica = Rank(rank, strategy, every=every, full_updates=full)
        replica.train(steps)
        return replica.weights()

    for results, expected in zip(Threads(RANKS).run(job), by_hand(steps, every, full), strict=True):
        torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("writers", [(0, 1), (1,)])
def test_what_somebody_writes_into_weights_between_rounds_is_no_change_that_is_sent(writers: tuple[int, ...]) -> None:
    def job(rank: int, strategy: Strategy) -> tuple[Tensor, Tensor]:
        replica = Rank(rank, strategy, every=3, compression="bf16", optimizer=standing)
        replica.train(3)
        before = replica.weights()
        if rank in writers:
            with torch.no_grad():
                for parameter in replica.model.parameters():
                    parameter.add_(10.0)
        replica.train(9)
        return before, replica.weights()

    for before, after in Threads(RANKS).run(job):
        torch.testing.assert_close(after, before + 10.0 * len(writers) / RANKS)


def test_what_powersgd_has_left_out_moves_no_frozen_parameter() -> None:
    def job(rank: int, strategy: Strategy) -> tuple[Tensor, Tensor, Tensor]:
        replica = Rank(rank, strategy, every=2, compression="powersgd:1")
        replica.train(6)
        replica.synchronizer.average_weights()
        weight, bias = replica.model.parameters()
        weight.requires_grad_(False)
        before, before_bias = weight.clone(), bias.detach().clone()
        replica.train(6)
        replica.synchronizer.average_weights()
        return before, weight, bias - before_bias

    for before, after, trained in Threads(RANKS).run(job):
        assert torch.equal(before, after)
        assert bool(trained.all())


def test_nothing_is_sent_within_a_round() -> None:
    threads = Threads(RANKS)
    threads.run(lambda rank, strategy: Rank(rank, strategy, every=5, full_updates=2).train(11))
    assert [name for name, _ in threads.messages] == ["whole.float64"] * 2 + ["weights.float64"]


@pytest.mark.parametrize("full", [0, 2])
def test_a_rank_that_steps_without_a_backward_pass_keeps_to_the_others_rounds(full: int) -> None:
    threads = Threads(RANKS)

    def job(rank: int, strategy: Strategy) -> Tensor:
        replica = Rank(rank, strategy, every=2, full_updates=full)
        for steps, without in ((1, True), (3, False), (2, True)):
            replica.train(steps, without_backward=without and rank == 1)
        return replica.weights()

    first, second = threads.run(job)
    assert torch.equal(first, second)
    kinds = [name.partition(".")[0] for name, _ in threads.messages]
    assert kinds == ["whole"] * full + ["weights"] * (3 - full // 2)


@pytest.mark.parametrize("full", [0, 3])
def test_a_parameter_that_no_rank_reaches_stays_as_it_was_and_gets_no_gradient(full: int) -> None:
    def job(rank: int, strategy: Strategy) -> tuple[Tensor | None, Tensor, Tensor]:
        replica = Rank(rank, strategy, every=1, full_updates=full)
        weight, bias = replica.model.parameters()
        before = bias.detach().clone()
        replica.synchronizer.before_backward()
        ((1 + rank) * weight).sum().backward()
        replica.synchronizer.after_backward()
        replica.synchronizer.complete()
        replica.optimizer.step()
        replica.synchronizer.after_step()
        return bias.grad, bias.detach() - before, replica.weights()

    (gradient, change, first), (*_, second) = Threads(RANKS).run(job)
    assert gradient is None
    assert not change.any()
    assert torch.equal(first, second)

"""Local training: what ranks that are threads average, and when."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.ranks_as_threads import Threads
from trainer.errors import TrainerError
from trainer.strategies.flat import Transport
from trainer.strategies.gradient_guard import GradientGuard
from trainer.strategies.local_sgd import LocalSynchronizer, Outer

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


class Rank:
    """One rank's training, as `Updates` does it."""

    def __init__(self, rank: int, transport: Transport, optimizer: Any = None, **options: Any) -> None:
        self.rank, self.model, self.steps = rank, network(), 0
        named = list(self.model.named_parameters())
        guard = GradientGuard(named, ranks_may_differ=False)
        self.synchronizer = LocalSynchronizer(self.model, named, guard, transport, **options)
        self.optimizer = (optimizer or sgd)(self.model)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.synchronizer.before_backward()
            loss(self.model, self.rank, self.steps).backward()
            self.synchronizer.after_backward()
            self.synchronizer.finish()
            self.optimizer.step()
            self.synchronizer.after_step()
            self.steps += 1

    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()]).clone()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def by_hand(steps: int, every: int, full: int = 0, outer: Outer | None = None) -> list[Tensor]:
    """Train both ranks' models in turns; return each rank's weights."""
    models = [network() for _ in range(RANKS)]
    anchor = network()
    optimizers = [sgd(model) for model in models]
    outside = (
        torch.optim.SGD(anchor.parameters(), outer.lr, outer.momentum, nesterov=outer.momentum > 0) if outer else None
    )
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
        if step == full - 1:
            anchor.load_state_dict(models[0].state_dict())
        if step >= full and (step - full + 1) % every == 0:
            end_round(models, anchor, outside)
    return [torch.cat([parameter.detach().flatten() for parameter in model.parameters()]) for model in models]


@torch.no_grad()
def end_round(models: list[nn.Module], anchor: nn.Module, outside: torch.optim.Optimizer | None) -> None:
    for parameters in zip(anchor.parameters(), *(model.parameters() for model in models), strict=True):
        mean = (parameters[1] + parameters[2]) / 2
        parameters[0].grad = parameters[0] - mean
        if outside is None:
            parameters[0].copy_(mean)
    if outside is not None:
        outside.step()
    for model in models:
        model.load_state_dict(anchor.state_dict())


@pytest.mark.parametrize("outer", [None, Outer(lr=0.7, momentum=0.9), Outer(lr=1.0, momentum=0.0)])
@pytest.mark.parametrize(("every", "full"), [(1, 0), (3, 0), (4, 2), (5, 13)])
@pytest.mark.parametrize("steps", [11, 12])
def test_rounds_are_those_of_the_paper(outer: Outer | None, every: int, full: int, steps: int) -> None:
    def job(rank: int, transport: Transport) -> Tensor:
        one = Rank(rank, transport, every=every, full_updates=full, outer=outer)
        one.train(steps)
        return one.weights()

    for found, expected in zip(Threads(RANKS).run(job), by_hand(steps, every, full, outer), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_an_outer_optimizer_with_rate_1_and_no_momentum_is_the_average() -> None:
    plain = by_hand(9, 3)
    outer = by_hand(9, 3, outer=Outer(lr=1.0, momentum=0.0))
    torch.testing.assert_close(plain, outer, rtol=1e-12, atol=1e-12)


def test_settling_ends_the_round_early_and_averages_the_optimizers_states_once() -> None:
    threads = Threads(RANKS)

    def job(rank: int, transport: Transport) -> tuple[Tensor, Tensor, Tensor]:
        one = Rank(rank, transport, every=4)
        one.train(6)
        before = one.weights()
        one.synchronizer.settle([one.optimizer])
        settled = one.weights()
        one.synchronizer.settle([one.optimizer])
        assert torch.equal(one.weights(), settled)
        momentum = torch.cat([one.optimizer.state[p]["momentum_buffer"].flatten() for p in one.model.parameters()])
        return before, settled, momentum.clone()

    (before0, settled0, momentum0), (before1, settled1, momentum1) = threads.run(job)
    assert not torch.equal(before0, before1)
    assert torch.equal(settled0, settled1)
    torch.testing.assert_close(settled0, (before0 + before1) / 2)
    assert torch.equal(momentum0, momentum1)
    assert [name for name, _ in threads.messages] == ["weights.float64", "weights.float64", "states.float64"]


def test_settling_averages_the_states_of_its_own_model_only() -> None:
    def job(rank: int, transport: Transport) -> float:
        one, other = Rank(rank, transport, every=2), nn.Linear(1, 1)
        both = torch.optim.SGD([*one.model.parameters(), *other.parameters()], lr=0.1, momentum=0.9)
        other.weight.grad = torch.full((1, 1), float(rank))
        both.step()
        one.train(1)
        one.synchronizer.settle([both])
        return float(both.state[other.weight]["momentum_buffer"])

    assert Threads(RANKS).run(job) == [0.0, 1.0]


def test_a_gradient_that_is_dropped_before_a_step_of_a_round_is_left_out() -> None:
    def job(rank: int, transport: Transport) -> None:
        one = Rank(rank, transport, every=2)
        one.synchronizer.before_backward()
        loss(one.model, rank, 0).backward()
        one.synchronizer.after_backward()
        one.model.bias.grad = None
        one.synchronizer.finish()

    Threads(1).run(job)


def test_nothing_is_sent_within_a_round() -> None:
    threads = Threads(RANKS)
    threads.run(lambda rank, transport: Rank(rank, transport, every=5, full_updates=2).train(11))
    assert [name for name, _ in threads.messages] == ["whole.float64"] * 2 + ["weights.float64"]


def test_a_run_goes_on_from_its_state_as_if_it_had_not_been_interrupted() -> None:
    outer = Outer(lr=0.7, momentum=0.9)

    def job(rank: int, transport: Transport) -> tuple[Tensor, Tensor]:
        options = {"every": 3, "full_updates": 2, "outer": outer}
        one = Rank(rank, transport, **options)
        one.train(7)
        one.synchronizer.settle([one.optimizer])
        kept = copy.deepcopy((one.model.state_dict(), one.optimizer.state_dict(), one.synchronizer.state_dict()))
        other = Rank(rank, transport, **options)
        other.model.load_state_dict(kept[0])
        other.optimizer.load_state_dict(kept[1])
        other.synchronizer.load_state_dict(kept[2])
        other.steps = one.steps
        for training in (one, other):
            training.train(7)
        return one.weights(), other.weights()

    for uninterrupted, resumed in Threads(RANKS).run(job):
        assert torch.equal(uninterrupted, resumed)


def test_without_a_state_of_its_own_the_outer_optimizer_begins_at_the_loaded_weights() -> None:
    def job(rank: int, transport: Transport) -> tuple[Tensor, Tensor]:
        one = Rank(rank, transport, every=1, outer=Outer(lr=0.7, momentum=0.9), optimizer=standing)
        with torch.no_grad():
            for parameter in one.model.parameters():
                parameter.add_(5)
        loaded = one.weights()
        one.synchronizer.load_state_dict({})
        one.train(2)
        return loaded, one.weights()

    for loaded, found in Threads(RANKS).run(job):
        torch.testing.assert_close(loaded, found)


def standing(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


@pytest.mark.parametrize("outer", [None, Outer(lr=0.7, momentum=0.9)])
def test_two_optimizers_of_one_model_are_one_update_and_end_with_the_same_weights(outer: Outer | None) -> None:
    threads = Threads(RANKS)

    def job(rank: int, transport: Transport) -> Tensor:
        one = Rank(rank, transport, every=2, full_updates=1, outer=outer)
        optimizers = [torch.optim.SGD([parameter], lr=0.01) for parameter in one.model.parameters()]
        for step in range(5):
            one.synchronizer.before_backward()
            one.model.zero_grad()
            loss(one.model, rank, step).backward()
            one.synchronizer.after_backward()
            one.synchronizer.finish()
            for optimizer in optimizers:
                optimizer.step()
                one.synchronizer.after_step()
        one.synchronizer.settle()
        return one.weights()

    first, second = threads.run(job)
    assert torch.equal(first, second)
    # A whole update's gradients, the averages of two rounds, and what the second optimizer has done since.
    assert [name.partition(".")[0] for name, _ in threads.messages].count("weights") == 3


def test_a_parameter_that_a_round_leaves_out_is_named() -> None:
    def job(rank: int, transport: Transport) -> None:
        one = Rank(rank, transport, every=2)
        one.synchronizer.before_backward()
        one.model.weight.sum().backward()  # type: ignore[operator]
        one.synchronizer.after_backward()
        with pytest.raises(TrainerError, match="parameter bias got no gradient"):
            one.synchronizer.finish()

    Threads(1).run(job)


def test_anchors_are_kept_from_the_first_round_on() -> None:
    def job(rank: int, transport: Transport) -> list[bool]:
        one = Rank(rank, transport, every=2, full_updates=2, outer=Outer(lr=0.7, momentum=0.9))
        kept = []
        for _ in range(3):
            one.train(1)
            kept.append(bool(one.synchronizer.state_dict()["anchors"]))
        return kept

    assert Threads(RANKS).run(job) == [[False, False, True]] * RANKS

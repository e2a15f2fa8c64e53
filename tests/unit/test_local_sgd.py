"""Local training: what ranks that are threads average, and when."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.unit.ranks_as_threads import Threads
from trainer import RunConfig, World
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


class Outer(NamedTuple):
    """An outer optimizer."""

    lr: float
    momentum: float


def rounds(
    *, every: int, full_updates: int = 0, overlap: bool = False, outer: Outer | None = None, compression: str = "none"
) -> RunConfig:
    """Return the settings of rounds of local updates."""
    lr, momentum = outer or (None, 0.0)
    return RunConfig(
        sync_every=every,
        full_updates=full_updates,
        sync_overlap=overlap,
        outer_lr=lr,
        outer_momentum=momentum,
        compression=compression,
    )


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
    def job(rank: int, strategy: Strategy) -> Tensor:
        replica = Rank(rank, strategy, every=every, full_updates=full, outer=outer)
        replica.train(steps)
        return replica.weights()

    for results, expected in zip(Threads(RANKS).run(job), by_hand(steps, every, full, outer), strict=True):
        torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)


class ByHand:
    """Both ranks' models, trained in turns, whose weights are sent during the next round."""

    def __init__(self, outer: Outer | None) -> None:
        self.models, self.anchor = [network() for _ in range(RANKS)], network()
        self._optimizers = [sgd(model) for model in self.models]
        self._outside = (
            torch.optim.SGD(self.anchor.parameters(), outer.lr, outer.momentum, nesterov=True) if outer else None
        )
        self._sent: list[Tensor] = []

    def train(self, steps: int, every: int) -> None:
        for step in range(steps):
            for rank, (model, optimizer) in enumerate(zip(self.models, self._optimizers, strict=True)):
                optimizer.zero_grad()
                loss(model, rank, step).backward()
                optimizer.step()
            if (step + 1) % every == 0:
                self.receive()
                self._sent = self.weights()

    @torch.no_grad()
    def receive(self) -> None:
        """Take the average of what was sent; each rank keeps what it has added since."""
        if not self._sent:
            return
        added = [now - sent for now, sent in zip(self.weights(), self._sent, strict=True)]
        average = torch.stack(self._sent).mean(0)
        if self._outside is None:
            nn.utils.vector_to_parameters(average, self.anchor.parameters())
        else:
            missing = nn.utils.parameters_to_vector(self.anchor.parameters()) - average
            pieces = missing.split([parameter.numel() for parameter in self.anchor.parameters()])
            for parameter, piece in zip(self.anchor.parameters(), pieces, strict=True):
                parameter.grad = piece.view_as(parameter)
            self._outside.step()
        common = nn.utils.parameters_to_vector(self.anchor.parameters())
        for model, rest in zip(self.models, added, strict=True):
            nn.utils.vector_to_parameters(common + rest, model.parameters())
        self._sent = []

    def settle(self, has_changed: bool) -> None:
        self.receive()
        if has_changed:
            end_round(self.models, self.anchor, self._outside)

    def weights(self) -> list[Tensor]:
        return [nn.utils.parameters_to_vector(model.parameters()).detach().clone() for model in self.models]


@pytest.mark.parametrize(
    ("outer", "every", "steps"),
    [
        *((Outer(lr=0.7, momentum=0.9), *pair) for pair in ((1, 5), (3, 2), (3, 3), (3, 4), (3, 11), (3, 12), (4, 12))),
        *(
            (None, *pair) for pair in ((3, 2), (3, 3), (3, 4), (3, 11), (3, 12), (4, 12))
        ),  # with 1, nothing averages weights
    ],
)
def test_an_overlapped_average_is_taken_a_round_later(outer: Outer | None, every: int, steps: int) -> None:
    def job(rank: int, strategy: Strategy) -> tuple[Tensor, Tensor]:
        replica = Rank(rank, strategy, every=every, overlap=True, outer=outer)
        replica.train(steps)
        before = replica.weights()
        replica.synchronizer.settle()
        return before, replica.weights()

    by_hand = ByHand(outer)
    by_hand.train(steps, every)
    before = by_hand.weights()
    by_hand.settle(has_changed=steps % every != 0)
    results = Threads(RANKS).run(job)
    for rank in range(RANKS):
        torch.testing.assert_close(results[rank][0], before[rank], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(results[rank][1], by_hand.weights()[rank], rtol=1e-12, atol=1e-12)
    assert torch.equal(results[0][1], results[1][1])


def test_an_overlapped_average_is_begun_at_the_end_of_its_round_and_awaited_at_the_end_of_the_next() -> None:
    events: list[str] = []

    def start(flat: Tensor, name: str) -> Callable[[], Tensor]:
        events.append(f"begun after {replica.steps}")

        def wait() -> Tensor:
            events.append(f"awaited after {replica.steps}")
            return flat.add_(1.0)

        return wait

    strategy: Any = SimpleNamespace(start_gradients=start, world=World())
    replica = Rank(0, strategy, every=2, overlap=True)
    replica.train(5)
    assert events == ["begun after 1", "awaited after 3", "begun after 3"]
    before = replica.weights()
    replica.synchronizer.load_state_dict({})  # what is on its way is received, and left out
    assert events[3:] == ["awaited after 5"]
    replica.synchronizer._take_average()
    assert torch.equal(replica.weights(), before)


@pytest.mark.parametrize("outer", [None, Outer(lr=0.7, momentum=0.9)])
@pytest.mark.parametrize("writers", [(0, 1), (1,)])
def test_what_somebody_writes_into_weights_that_were_sent_stays(outer: Outer | None, writers: tuple[int]) -> None:
    def job(rank: int, strategy: Strategy) -> tuple[Tensor, Tensor]:
        replica = Rank(rank, strategy, every=3, overlap=True, outer=outer)
        replica.train(3)
        sent = replica.weights()
        if rank in writers:
            with torch.no_grad():
                for parameter in replica.model.parameters():
                    parameter.add_(10.0)
        replica.synchronizer.settle()
        return sent, replica.weights()

    results = Threads(RANKS).run(job)
    assert torch.equal(results[0][1], results[1][1])
    mean_sent = torch.stack([sent for sent, _ in results]).mean(0)
    if outer is None:
        torch.testing.assert_close(results[0][1], mean_sent + 10.0 * len(writers) / RANKS)
    else:
        assert (results[0][1] - mean_sent).min() > 2.0


def test_an_outer_optimizer_with_rate_1_and_no_momentum_is_the_average() -> None:
    plain = by_hand(9, 3)
    outer = by_hand(9, 3, outer=Outer(lr=1.0, momentum=0.0))
    torch.testing.assert_close(plain, outer, rtol=1e-12, atol=1e-12)


def test_nothing_is_sent_within_a_round() -> None:
    threads = Threads(RANKS)
    threads.run(lambda rank, strategy: Rank(rank, strategy, every=5, full_updates=2).train(11))
    assert [name for name, _ in threads.messages] == ["whole.float64"] * 2 + ["weights.float64"]


@pytest.mark.parametrize("outer", [None, Outer(lr=0.7, momentum=0.9)])
@pytest.mark.parametrize("full", [0, 2])
def test_a_rank_that_steps_without_a_backward_pass_keeps_to_the_others_rounds(full: int, outer: Outer | None) -> None:
    threads = Threads(RANKS)

    def job(rank: int, strategy: Strategy) -> Tensor:
        replica = Rank(rank, strategy, every=2, full_updates=full, outer=outer)
        for steps, without in ((1, True), (3, False), (2, True)):
            replica.train(steps, without_backward=without and rank == 1)
        return replica.weights()

    first, second = threads.run(job)
    assert torch.equal(first, second)
    kinds = [name.partition(".")[0] for name, _ in threads.messages]
    assert kinds == ["whole"] * full + ["weights"] * (3 - full // 2)


@pytest.mark.parametrize("outer", [None, Outer(lr=0.7, momentum=0.9)])
def test_two_optimizers_of_one_model_are_one_update_and_end_with_the_same_weights(outer: Outer | None) -> None:
    threads = Threads(RANKS)

    def job(rank: int, strategy: Strategy) -> Tensor:
        replica = Rank(rank, strategy, every=2, full_updates=1, outer=outer)
        optimizers = [torch.optim.SGD([parameter], lr=0.01) for parameter in replica.model.parameters()]
        for step in range(5):
            replica.steps = step
            replica.backward()
            for optimizer in optimizers:
                optimizer.step()
                replica.synchronizer.after_step()
            # The first round begins after both optimizers' steps of the synchronous update.
            assert replica.synchronizer._has_begun == (step > 0)
            if step == 0:
                # Nothing differs yet, and an outer step would be one from weights of before.
                replica.synchronizer.settle()
        replica.synchronizer.settle()
        return replica.weights()

    first, second = threads.run(job)
    assert torch.equal(first, second)
    # A whole update's gradients, the averages of two rounds, and what the second optimizer has done since.
    assert [name.partition(".")[0] for name, _ in threads.messages].count("weights") == 3


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

"""PowerSGD: what it sends, what it applies and what it keeps, on ranks that are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.ranks_as_threads import Threads
from trainer.strategies.base import Strategy
from trainer.strategies.compress.power_sgd import Factors, PowerSGDSynchronizer

SHAPES = {"matrix": (12, 9), "kernel": (6, 4, 3, 3), "bias": (12,), "scale": ()}
FLAGS = len(SHAPES)
"""Numbers that tell which parameters have a gradient on some rank."""


class Parameters(nn.Module):
    """Parameters of some shapes, as of a network."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape, dtype=dtype)))


class Rank:
    """One rank's model, and what makes its gradients the mean."""

    def __init__(self, strategy: Strategy, model: nn.Module | None = None, **options: Any) -> None:
        self.model = model or Parameters()
        options = {"rank": 2, "least_saving": 0.0, **options}
        self.synchronizer = PowerSGDSynchronizer(list(self.model.named_parameters()), strategy, **options)

    def update(self, given: dict[str, Tensor], *, set_to_none: bool = True) -> dict[str, Tensor]:
        """Return what an optimizer would apply of these local gradients; without any, there is no backward pass."""
        self.model.zero_grad(set_to_none)
        if given:
            named = dict(self.model.named_parameters())
            self.synchronizer.before_backward()
            torch.stack([(named[name] * gradient).sum() for name, gradient in given.items()]).sum().backward()
            self.synchronizer.after_backward()
        self.synchronizer.complete()
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def factors(self, place: int = 0) -> Factors:
        return self.synchronizer._power.factors[place]

    def errors(self) -> dict[str, Tensor]:
        errors: dict[str, Tensor] = self.synchronizer.state_dict()["errors"]
        return errors


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def means(ranks: int, step: int) -> dict[str, Tensor]:
    by_rank = [gradients(rank, step) for rank in range(ranks)]
    return {name: torch.stack([tensors[name] for tensors in by_rank]).mean(0) for name in SHAPES}


def close(tensor: Tensor, other: Tensor, tolerance: float = 1e-12) -> bool:
    return float((tensor - other).norm()) <= tolerance * max(1.0, float(other.norm()))


def test_updates_and_the_mean_error_add_up_to_the_mean_gradients() -> None:
    def job(rank: int, strategy: Strategy) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        replica = Rank(strategy)
        applied = [replica.update(gradients(rank, step)) for step in range(5)]
        total = {name: torch.stack([update[name] for update in applied]).sum(0) for name in SHAPES}
        return total, replica.errors()

    for total, errors in Threads(3).run(job):
        assert set(errors) == {"matrix", "kernel"}
        for name in SHAPES:
            wanted = torch.stack([means(3, step)[name] for step in range(5)]).sum(0)
            error = errors[name].view(SHAPES[name]) if name in errors else torch.zeros(SHAPES[name])
            assert close(total[name] + error, wanted)
        assert float(errors["matrix"].norm()) > 1.0  # something was left out


def test_a_matrix_whose_factors_save_too_little_is_sent_whole() -> None:
    threads = Threads(1)
    threads.run(lambda rank, strategy: Rank(strategy, least_saving=2.0).update(gradients(rank, 0)))
    # (12 + 9) · 2 · 2 < 12 · 9 and (6 + 36) · 2 · 2 < 6 · 36 hold; with 3 in place of the last 2, neither does.
    assert threads.messages[0][1] == 2 * (12 + 6) + 13 + FLAGS
    threads.run(lambda rank, strategy: Rank(strategy, least_saving=3.0).update(gradients(rank, 0)))
    assert threads.messages[-1] == ("left.float64", 12 * 9 + 6 * 36 + 13 + FLAGS)


def test_what_is_not_finite_on_one_rank_is_nan_on_all_and_forgotten_afterwards() -> None:
    def job(rank: int, strategy: Strategy) -> tuple[Tensor, Tensor]:
        replica = Rank(strategy, rank=100)
        given = gradients(rank, 0)
        if rank == 1:
            given["matrix"][3, 3] = torch.inf
        first = replica.update(given)["matrix"]
        return first, replica.update(gradients(rank, 1))["matrix"]

    for first, second in Threads(2).run(job):
        assert bool(first.isnan().all())
        assert close(second, means(2, 1)["matrix"])


def test_what_was_left_out_waits_while_no_rank_has_a_gradient() -> None:
    def job(rank: int, strategy: Strategy) -> Tensor:
        replica = Rank(strategy)
        first = replica.update(gradients(rank, 0))["matrix"]
        without = {name: gradient for name, gradient in gradients(rank, 1).items() if name != "matrix"}
        assert "matrix" not in replica.update(without)
        return first + replica.update(gradients(rank, 2))["matrix"] + replica.errors()["matrix"]

    for results in Threads(2).run(job):
        assert close(results, means(2, 0)["matrix"] + means(2, 2)["matrix"])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_another_number_of_ranks_goes_on_from_the_state(ranks: int) -> None:
    def begin(rank: int, strategy: Strategy) -> dict[str, Any]:
        replica = Rank(strategy, full_updates=1)
        for step in range(3):
            replica.update(gradients(rank, step))
        return replica.synchronizer.state_dict()

    states = Threads(2).run(begin)
    assert states[0]["updates"] == 3
    assert all(torch.equal(states[0]["errors"][name], states[1]["errors"][name]) for name in ("matrix", "kernel"))

    def go_on(rank: int, strategy: Strategy) -> Tensor:
        replica = Rank(strategy, full_updates=1)
        replica.synchronizer.load_state_dict(states[0])
        return replica.update(means(2, 3))["matrix"]  # the same mean, however many ranks

    expected = update_after(states[0])
    assert all(close(results, expected) for results in Threads(ranks).run(go_on))


def update_after(state: dict[str, Any]) -> Tensor:
    """Return the next update's matrix by the formula: M = P·Pᵀ·(G + e), with P an orthonormal basis of (G + e)·Q."""
    matrix: Tensor = means(2, 3)["matrix"] + state["errors"]["matrix"]
    basis: Tensor = torch.linalg.qr(matrix @ state["factors"]["matrix"]).Q
    return basis @ basis.T @ matrix

"""PowerSGD: where it begins, and passes and steps that are out of the ordinary; on ranks that are threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.unit.ranks_as_threads import Threads
from tests.unit.test_power_sgd import SHAPES, Parameters, Rank, close, gradients, means
from trainer.strategies.base import Strategy


def test_ranks_begin_with_the_same_factors_and_parameters_with_their_own() -> None:
    def job(rank: int, strategy: Strategy) -> list[Tensor]:
        replica = Rank(strategy, nn.Sequential(*(nn.Linear(9, 12, bias=False) for _ in range(2))))
        return [replica.factors(place).right for place in range(2)]

    (first, second), of_the_other_rank = Threads(2).run(job)
    assert torch.equal(torch.stack([first, second]), torch.stack(of_the_other_rank))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_the_size_of_gradients_does_not_matter(size: float) -> None:
    def job(rank: int, strategy: Strategy) -> Tensor:
        replica = Rank(strategy, Parameters(torch.float32))
        results = []
        for step in range(3):
            given = {name: size * gradient for name, gradient in gradients(rank, step, torch.float32).items()}
            results.append(replica.update(given)["matrix"].double() / size)
        return torch.stack(results)

    def expected(rank: int, strategy: Strategy) -> Tensor:
        replica = Rank(strategy)
        results = [replica.update(to_double(gradients(rank, step, torch.float32))) for step in range(3)]
        return torch.stack([applied["matrix"] for applied in results])

    (results,), (wanted,) = Threads(1).run(job), Threads(1).run(expected)
    torch.testing.assert_close(results, wanted, rtol=1e-3, atol=1e-4)


def to_double(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in tensors.items()}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_dropped_leave_nothing_for_later_steps(set_to_none: bool) -> None:
    def job(rank: int, strategy: Strategy) -> Tensor:
        replica = Rank(strategy)
        left = torch.zeros(SHAPES["matrix"], dtype=torch.float64)
        for step in range(5):
            given = gradients(rank, step)
            applied = replica.update(given, set_to_none=set_to_none)["matrix"]
            if step:  # the first time that gradients are dropped, so is what was left before
                left += given["matrix"] - applied
            replica.synchronizer.after_step()
            replica.update(gradients(rank, 100 + step), set_to_none=set_to_none)  # with a step of another model's
        replica.model.zero_grad(set_to_none)
        replica.synchronizer.before_backward()
        return left - replica.factors().error.view_as(left)

    assert close(torch.stack(Threads(2).run(job)).sum(0), torch.zeros(SHAPES["matrix"], dtype=torch.float64))


def test_a_rank_without_a_backward_pass_sends_zeros() -> None:
    def job(rank: int, strategy: Strategy) -> Tensor:
        replica = Rank(strategy, rank=100)
        replica.update(gradients(rank, 0))
        return replica.update(gradients(rank, 1) if rank == 0 else {})["matrix"]

    for results in Threads(2).run(job):
        assert close(results, gradients(0, 1)["matrix"] / 2)


def test_a_parameter_without_elements_is_sent_whole() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.empty(0, 3))

    (results,) = Threads(1).run(lambda _, strategy: Rank(strategy, Empty()).update({"none": torch.empty(0, 3)}))
    assert results["none"].shape == (0, 3)


def test_gradients_may_be_changed_between_the_passes_of_an_update() -> None:
    def job(rank: int, strategy: Strategy) -> dict[str, Tensor]:
        replica = Rank(strategy, rank=100)
        replica.synchronizer.before_backward(is_local=True)
        for name, parameter in replica.model.named_parameters():
            (parameter * gradients(rank, 0)[name]).sum().backward()
            assert parameter.grad is not None
            parameter.grad.mul_(2)
        replica.synchronizer.after_backward()
        replica.synchronizer.complete()
        return {
            name: parameter.grad for name, parameter in replica.model.named_parameters() if parameter.grad is not None
        }

    for results in Threads(2).run(job):
        assert all(close(results[name], 2 * mean) for name, mean in means(2, 0).items())

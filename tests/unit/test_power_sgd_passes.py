"""PowerSGD: where it begins, and passes and steps that are out of the ordinary; on ranks that are threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.ranks_as_threads import Threads
from tests.unit.test_power_sgd import SHAPES, Parameters, Rank, close, gradients
from trainer.strategies.base import Strategy


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

"""PowerSGD: where it begins, and passes and steps that are out of the ordinary; on ranks that are threads."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from tests.unit.ranks_as_threads import Threads
from tests.unit.test_power_sgd import Parameters, close, gradients, make, update
from trainer.errors import TrainerError
from trainer.strategies.flat import Transport


def test_ranks_begin_with_the_same_factors_and_parameters_with_their_own() -> None:
    def job(rank: int, transport: Transport) -> list[Tensor]:
        synchronizer = make(transport, nn.Sequential(*(nn.Linear(9, 12, bias=False) for _ in range(2))))
        return [factors.right for factors in synchronizer._factors.values()]

    (first, second), of_the_other_rank = Threads(2).run(job)
    assert torch.equal(torch.stack([first, second]), torch.stack(of_the_other_rank))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_the_size_of_gradients_does_not_matter(size: float) -> None:
    def job(rank: int, transport: Transport) -> Tensor:
        synchronizer = make(transport, Parameters(torch.float32))
        found = []
        for step in range(3):
            given = {name: size * one for name, one in gradients(rank, step, torch.float32).items()}
            found.append(update(synchronizer, given)["matrix"].double() / size)
        return torch.stack(found)

    def expected(rank: int, transport: Transport) -> Tensor:
        synchronizer = make(transport)
        found = [update(synchronizer, to_double(gradients(rank, step, torch.float32))) for step in range(3)]
        return torch.stack([one["matrix"] for one in found])

    (found,), (wanted,) = Threads(1).run(job), Threads(1).run(expected)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def to_double(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.double() for name, one in tensors.items()}


def test_finishing_again_with_dropped_gradients_sends_nothing_and_keeps_the_error() -> None:
    threads = Threads(1)

    def job(rank: int, transport: Transport) -> None:
        synchronizer = make(transport)
        update(synchronizer, gradients(rank, 0))
        error = synchronizer._factors[0].error.clone()
        synchronizer.forward.zero_grad()
        synchronizer.finish()  # before the step of another optimizer of this model
        assert torch.equal(synchronizer._factors[0].error, error)
        assert synchronizer.updates == 1

    threads.run(job)
    assert len(threads.messages) == 2


def test_a_rank_that_steps_without_a_backward_pass_sends_zeros() -> None:
    def job(rank: int, transport: Transport) -> Tensor | None:
        synchronizer = make(transport, rank=100)
        update(synchronizer, gradients(rank, 0))
        synchronizer.forward.zero_grad()
        if rank == 0:
            return update(synchronizer, gradients(rank, 1))["matrix"]
        synchronizer.reopen()
        synchronizer.finish()
        return next(synchronizer.forward.parameters()).grad

    for found in Threads(2).run(job):
        assert close(found, gradients(0, 1)["matrix"] / 2)  # type: ignore[arg-type]


def test_a_parameter_without_elements_is_sent_whole() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.empty(0, 3))

    (found,) = Threads(1).run(lambda _, transport: update(make(transport, Empty()), {"none": torch.empty(0, 3)}))
    assert found["none"].shape == (0, 3)


def test_a_gradient_changed_between_backward_and_step_is_refused() -> None:
    def job(rank: int, transport: Transport) -> None:
        synchronizer = make(transport)
        for parameter in synchronizer.forward.parameters():
            parameter.grad = torch.ones_like(parameter)
        synchronizer.after_backward()
        next(iter(synchronizer.forward.parameters())).grad.mul_(2)  # type: ignore[union-attr]
        synchronizer.finish()

    with pytest.raises(TrainerError, match="the gradient of matrix was changed between backward and step"):
        Threads(1).run(job)


@pytest.mark.parametrize("is_local", [True, False])
def test_gradients_may_be_changed_between_passes_within_no_sync_only(is_local: bool) -> None:
    synchronizer = make(Threads(1).transport(0))
    synchronizer.keep_local(is_local)
    for parameter in synchronizer.forward.parameters():
        parameter.grad = torch.ones_like(parameter)
    synchronizer.after_backward()
    next(iter(synchronizer.forward.parameters())).grad.mul_(2)  # type: ignore[union-attr]
    with nullcontext() if is_local else pytest.raises(TrainerError, match="the gradient of matrix was changed"):
        synchronizer.before_backward()

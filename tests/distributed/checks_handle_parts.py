"""Steps that use a part of a model, or a model of which nothing is trained; run on every rank of one job."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.checks_every_strategy import assert_same_on_all_ranks
from tests.distributed.reference import sgd
from trainer import TrainerError, init
from trainer.models.sharded import gather
from trainer.strategies.base import Strategy


class Parts(nn.Module):
    """Three numbers, of which each pass uses one and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.both = (nn.Parameter(torch.ones(1)) for _ in range(3))

    def forward(self, part: str) -> Tensor:
        used: Tensor = getattr(self, part) + self.both
        return used.sum()


def check_two_passes_of_a_step_may_come_in_another_order_on_each_rank(strategy: Strategy) -> None:
    model = Parts()
    run = init(strategy)
    forward, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for part in "ab" if strategy.world.rank % 2 == 0 else "ba":
        run.backward(forward(part))
    optimizer.step()
    # Thirds are rounded.
    assert [gather(one).item() for one in model.parameters()] == pytest.approx([0.0, 0.0, -1.0], abs=1e-6)


def check_a_model_of_which_nothing_is_trained(strategy: Strategy) -> None:
    teacher, student = nn.Linear(3, 2).requires_grad_(False), nn.Linear(3, 2)
    both = [*teacher.parameters(), *student.parameters()]
    run = init(strategy)
    taught, learning, optimizer = run.prepare(teacher, student, torch.optim.SGD(both, lr=0.1))
    for _ in range(2):
        inputs = torch.ones(2, 3, device=run.device) + strategy.world.rank
        run.backward((taught(inputs) - learning(inputs)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert_same_on_all_ranks(strategy, teacher)
    assert_same_on_all_ranks(strategy, student)


class WithSpare(nn.Module):
    """A layer that is used, and one that the ranks in `users` use."""

    def __init__(self, users: set[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.spare = nn.Linear(3, 2), nn.Linear(3, 2)
        self.users = users

    def forward(self, x: Tensor, rank: int) -> Tensor:
        out: Tensor = self.used(x)
        return out + self.spare(x) if rank in self.users else out


def steps_with_spare(strategy: Strategy, *, zeros: bool) -> None:
    run, model = init(strategy), WithSpare(set())
    if zeros:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    forward, optimizer = run.prepare(model, sgd(model))
    for _ in range(2):
        optimizer.zero_grad(set_to_none=not zeros)
        run.backward(forward(torch.ones(1, 3, device=run.device), run.rank).sum())
        optimizer.step()


def check_a_parameter_without_a_gradient_is_told_where_gradients_are_sharded(strategy: Strategy) -> None:
    for zeros in (True, False):
        with (
            pytest.raises(TrainerError, match=r"^parameter spare\.weight and 1 more got no gradient")
            if strategy.shards
            else nullcontext()
        ):
            steps_with_spare(strategy, zeros=zeros)
    strategy.barrier()


def check_a_dynamic_graph_moves_no_parameter_that_got_no_gradient(strategy: Strategy) -> None:
    """Weight decay and momentum would move it with a gradient of zeros."""
    if strategy.shards:  # which needs a gradient of every parameter
        return
    last = strategy.world.size - 1
    for users in (set(), {last}, set(range(strategy.world.size))):
        run, model = init(strategy), WithSpare(users)
        before = model.spare.weight.detach().clone()
        forward, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1))
        for _ in range(2):
            run.backward(forward(torch.ones(1, 3, device=run.device), run.rank).sum())
            optimizer.step()
            assert (model.spare.weight.grad is None) == (not users)
            optimizer.zero_grad()
        moved = not torch.equal(model.spare.weight.cpu(), before)
        assert moved == bool(users)
        assert_same_on_all_ranks(strategy, model)

"""Local training: what is averaged for a checkpoint, kept in it and loaded from it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tests.unit.ranks_as_threads import Threads
from tests.unit.test_local_sgd import RANKS, Rank
from trainer.strategies.base import Strategy


def test_settling_ends_the_round_early_and_averages_the_optimizers_states_once() -> None:
    threads = Threads(RANKS)

    def job(rank: int, strategy: Strategy) -> tuple[Tensor, Tensor, Tensor]:
        replica = Rank(rank, strategy, every=4)
        replica.train(6)
        before = replica.weights()
        replica.synchronizer.average_weights([replica.optimizer])
        averaged = replica.weights()
        replica.synchronizer.average_weights([replica.optimizer])
        assert torch.equal(replica.weights(), averaged)
        momentum = torch.cat(
            [replica.optimizer.state[p]["momentum_buffer"].flatten() for p in replica.model.parameters()]
        )
        return before, averaged, momentum.clone()

    (before0, settled0, momentum0), (before1, settled1, momentum1) = threads.run(job)
    assert not torch.equal(before0, before1)
    assert torch.equal(settled0, settled1)
    torch.testing.assert_close(settled0, (before0 + before1) / 2)
    assert torch.equal(momentum0, momentum1)
    assert [name for name, _ in threads.messages] == ["weights.float64", "weights.float64", "states.float64"]


@pytest.mark.parametrize("compression", ["none", "bf16", "powersgd:1"])
def test_a_run_goes_on_from_its_state_as_if_it_had_not_been_interrupted(compression: str) -> None:
    def job(rank: int, strategy: Strategy) -> tuple[Tensor, Tensor]:
        options = {"every": 3, "full_updates": 2, "compression": compression}
        replica = Rank(rank, strategy, **options)
        replica.train(7)
        replica.synchronizer.average_weights([replica.optimizer])
        kept = copy.deepcopy(
            (replica.model.state_dict(), replica.optimizer.state_dict(), replica.synchronizer.state_dict())
        )
        other = Rank(rank, strategy, **options)
        other.model.load_state_dict(kept[0])
        other.optimizer.load_state_dict(kept[1])
        other.synchronizer.load_state_dict(kept[2])
        other.steps = replica.steps
        for training in (replica, other):
            training.train(7)
        return replica.weights(), other.weights()

    for uninterrupted, resumed in Threads(RANKS).run(job):
        assert torch.equal(uninterrupted, resumed)

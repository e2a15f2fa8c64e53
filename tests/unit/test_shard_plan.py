"""The plan: every sample once, the same on every rank without communication, in one process's steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.shard_plan import ShardPlan, permutation
from trainer.errors import ConfigError

PLANS = st.builds(
    ShardPlan,
    samples=st.integers(1, 300),
    world_size=st.integers(1, 9),
    batch_size=st.integers(1, 17),
    accumulate=st.integers(1, 5),
)
SEEDS = st.integers(0, 2**32 - 1)


def for_any_plan(test: Callable[[ShardPlan], None]) -> Callable[[], None]:
    # No deadline: the machine may be busy, and no example takes long.
    decorated: Callable[[], None] = settings(deadline=None, max_examples=200)(given(plan=PLANS)(test))
    return decorated


def pieces(plan: ShardPlan, step: int) -> list[range]:
    """What each rank takes in a step."""
    cuts = [plan.shard(step, rank) for rank in range(plan.world_size)]
    return [range(cut.start, cut.stop) for cut in cuts]


def updates(plan: ShardPlan) -> list[list[int]]:
    """The steps of each update."""
    groups: list[list[int]] = [[]]
    for step in range(plan.steps):
        groups[-1].append(step)
        if plan.closes_update(step):
            groups.append([])
    assert groups.pop() == [], "the last step closes an update"
    return groups


@for_any_plan
def test_every_sample_is_taken_exactly_once_per_epoch(plan: ShardPlan) -> None:
    taken = [place for step in range(plan.steps) for piece in pieces(plan, step) for place in piece]
    assert sorted(taken) == list(range(plan.samples))


@for_any_plan
def test_no_rank_takes_more_than_its_batch_or_a_single_sample_that_it_could_share(plan: ShardPlan) -> None:
    for step in range(plan.steps):
        sizes = [len(piece) for piece in pieces(plan, step)]
        assert max(sizes) <= plan.batch_size
        # Three samples do not go into batches of two without a single one left.
        assert plan.batch_size <= 2 or sum(sizes) == 1 or 1 not in sizes


@for_any_plan
def test_a_step_takes_the_samples_of_one_process_with_the_global_batch(plan: ShardPlan) -> None:
    alone = ShardPlan(samples=plan.samples, batch_size=plan.batch_size * plan.world_size, accumulate=plan.accumulate)
    assert plan.steps == alone.steps
    for step in range(plan.steps):
        together = [place for piece in pieces(plan, step) for place in piece]
        assert together == list(pieces(alone, step)[0])
        assert plan.closes_update(step) == alone.closes_update(step)


@for_any_plan
def test_the_weight_is_exact_in_full_updates_and_zero_without_samples(plan: ShardPlan) -> None:
    for steps in updates(plan):
        cut = [piece for step in steps for piece in pieces(plan, step)]
        full = sum(map(len, cut)) == plan.step_size * plan.accumulate
        for step in steps:
            for rank, piece in enumerate(pieces(plan, step)):
                weight = plan.weight(step, rank)
                assert not full or weight == 1.0 / plan.accumulate
                assert (weight == 0.0) == (len(piece) == 0)


@for_any_plan
def test_the_mean_over_ranks_of_weighted_local_means_is_the_mean_over_samples(plan: ShardPlan) -> None:
    values = [float(place**2 % 97) for place in range(plan.samples)]
    for steps in updates(plan):
        weighted = 0.0
        seen: list[float] = []
        for step in steps:
            for rank, piece in enumerate(pieces(plan, step)):
                mine = [values[place] for place in piece]
                seen += mine
                weighted += plan.weight(step, rank) * (sum(mine) / len(mine) if mine else 0.0)
        assert weighted / plan.world_size == pytest.approx(sum(seen) / len(seen), rel=1e-12, abs=1e-12)


# From 30 samples on two orders are equal by accident once in 10^32 times.
@settings(deadline=None, max_examples=100)
@given(samples=st.integers(30, 200), epochs=st.sets(SEEDS, min_size=2, max_size=2), seed=SEEDS)
def test_the_permutation_differs_between_epochs_and_between_seeds(samples: int, epochs: set[int], seed: int) -> None:
    one, other = epochs
    assert not torch.equal(permutation(samples, epoch=one, seed=seed), permutation(samples, epoch=other, seed=seed))
    assert not torch.equal(permutation(samples, epoch=seed, seed=one), permutation(samples, epoch=seed, seed=other))
    # Nor does a run with the next seed begin with this run's next epoch.
    assert not torch.equal(permutation(samples, epoch=one, seed=other), permutation(samples, epoch=other, seed=one))


@pytest.mark.parametrize("name", ["samples", "world_size", "batch_size", "accumulate"])
@pytest.mark.parametrize("value", [0, -3])
def test_a_number_that_is_not_positive_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"^{name.replace('_', ' ')} is {value}; it must be at least 1$"):
        ShardPlan(**{"samples": 5, name: value})

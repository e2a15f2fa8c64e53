"""Positions in samples: every sample of an epoch once, over any interruptions and numbers of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_loader import numbered, world
from trainer import ConfigError, InMemory, ShardedLoader, StreamLoader
from trainer.data.batches import Step
from trainer.data.shard_plan import ShardPlan


@given(
    samples=st.integers(1, 120),
    batch_size=st.integers(1, 9),
    accumulate=st.integers(1, 3),
    is_global=st.booleans(),
    parts=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 6)), min_size=1, max_size=6),
    last=st.integers(1, 8),
)
@settings(max_examples=150, deadline=None)
def test_every_sample_comes_once_over_any_interruptions_and_world_sizes(
    samples: int, batch_size: int, accumulate: int, is_global: bool, parts: list[tuple[int, int]], last: int
) -> None:
    sizes: dict[str, Any] = {"global_batch_size": batch_size} if is_global else {"batch_size": batch_size}
    seen: Counter[int] = Counter()
    state = None
    for ranks, updates in [*parts, (last, 1000)]:
        loaders = [
            ShardedLoader(numbered(samples), world=world(rank, ranks), accumulate=accumulate, seed=5, **sizes)
            for rank in range(ranks)
        ]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        epoch = loaders[0].epoch
        passes = [loader.steps() for loader in loaders]
        state = take(loaders, passes, updates, seen)
        if state["epoch"] > epoch:
            break
    assert seen == Counter(range(samples))


def take(
    loaders: list[ShardedLoader], passes: list[Iterator[Step]], updates: int, seen: Counter[int]
) -> dict[str, Any]:
    """Go over some updates of all ranks, count the samples, and return the position afterwards."""
    state = loaders[0].state_dict()
    while updates:
        steps = [next(one, None) for one in passes]
        if steps[0] is None:
            assert steps == [None] * len(passes)
            return loaders[0].state_dict()
        for step in steps:
            assert step is not None
            seen.update(int(index) for index in step.batch[1][: step.count])
        if steps[0].closes_update:
            states = [loader.state_dict() for loader in loaders]
            assert states == [states[0]] * len(states)
            state, updates = states[0], updates - 1
    return state


@given(samples=st.integers(1, 100), start=st.integers(0, 100), ranks=st.integers(1, 6), size=st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_the_rest_of_an_epoch_weighs_each_sample_the_same(samples: int, start: int, ranks: int, size: int) -> None:
    plan = ShardPlan(samples=samples, start=min(start, samples), world_size=ranks, global_batch_size=size, accumulate=2)
    for first in range(0, plan.steps, 2):
        steps = range(first, min(first + 2, plan.steps))
        counts = {
            (step, rank): len(range(*plan.shard(step, rank).indices(samples)))
            for step in steps
            for rank in range(ranks)
        }
        for (step, rank), count in counts.items():
            assert plan.weight(step, rank) == pytest.approx(count * ranks / sum(counts.values()))


def test_the_batches_after_an_interruption_are_those_of_the_uninterrupted_epoch() -> None:
    whole = [step.batch[1].tolist() for step in ShardedLoader(numbered(23), 4, seed=3).steps()]
    interrupted = ShardedLoader(numbered(23), 4, seed=3)
    passing = interrupted.steps()
    first = [next(passing).batch[1].tolist() for _ in range(2)]
    state = interrupted.state_dict()
    assert (state["epoch"], state["taken"]) == (0, 8)
    again = ShardedLoader(numbered(23), 4, seed=3)
    again.load_state_dict(state)
    assert first + [step.batch[1].tolist() for step in again.steps()] == whole
    # The next epoch is a whole one, and the same as without an interruption.
    list(passing)
    assert [step.batch[1].tolist() for step in again.steps()] == [
        step.batch[1].tolist() for step in interrupted.steps()
    ]


def test_a_pass_that_was_complete_has_no_batch_left() -> None:
    loader = ShardedLoader(numbered(8), 4)
    loader.load_state_dict({**loader.state_dict(), "taken": 8})
    assert list(loader.steps()) == []
    assert loader.epoch == 1
    assert len(list(loader.steps())) == 2


def test_drop_last_leaves_out_what_does_not_fill_a_step_of_the_new_world() -> None:
    state = ShardedLoader(numbered(23), 4, drop_last=True).state_dict()
    loaders = [ShardedLoader(numbered(23), 3, world=world(rank, 2), drop_last=True) for rank in range(2)]
    for loader in loaders:
        loader.load_state_dict({**state, "taken": 8})
    assert [[step.count for step in loader.steps()] for loader in loaders] == [[3, 3], [3, 3]]  # of 15 left


@pytest.mark.parametrize(
    ("other", "words"), [({"seed": 1}, "seed 0, and here it is 1"), ({"shuffle": False}, "shuffle")]
)
def test_a_position_in_another_order_is_refused(other: dict[str, Any], words: str) -> None:
    for taken in (0, 4):
        state = {**ShardedLoader(numbered(9), 2).state_dict(), "taken": taken}
        with pytest.raises(ConfigError, match=words):
            ShardedLoader(numbered(9), 2, **other).load_state_dict(state)


def test_a_position_in_the_table_of_an_earlier_version_is_refused() -> None:
    loader = ShardedLoader(range(2**20 + 1), 2)
    with pytest.raises(ConfigError, match="holds for shuffle True, and here it is computed"):
        loader.load_state_dict({**loader.state_dict(), "taken": 4, "shuffle": True})


def test_a_position_within_other_data_is_refused() -> None:
    state = {**ShardedLoader(numbered(9), 2).state_dict(), "taken": 4}
    with pytest.raises(ConfigError, match="holds for samples 9, and here it is 10"):
        ShardedLoader(numbered(10), 2).load_state_dict(state)


def test_a_stream_goes_on_where_it_stopped_on_as_many_ranks() -> None:
    whole = [step.batch.tolist() for step in StreamLoader(Numbers(11), 2).steps()]
    interrupted = StreamLoader(Numbers(11), 2)
    passing = interrupted.steps()
    first = [next(passing).batch.tolist() for _ in range(3)]
    state = interrupted.state_dict()
    again = StreamLoader(Numbers(11), 2)
    again.load_state_dict(state)
    steps = list(again.steps())
    assert first + [step.batch.tolist() for step in steps] == whole
    assert (steps[-1].taken, again.epoch) == (11, 1)
    assert [step.batch.tolist() for step in again.steps()] == whole
    with pytest.raises(ConfigError, match="holds for samples per step 2, and here it is 3"):
        StreamLoader(Numbers(11), 3).load_state_dict(state)


class Numbers:
    """A stream of numbers."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._count))

    def __len__(self) -> int:
        return self._count


def test_what_a_worker_has_loaded_ahead_is_not_taken() -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(12.0), torch.arange(12))
    loader = ShardedLoader(dataset, 2, shuffle=False, num_workers=1, prefetch_factor=3)
    passing = loader.steps()
    next(passing)
    assert loader.state_dict()["taken"] == 2
    again = ShardedLoader(InMemory(torch.arange(12.0), torch.arange(12)), 2, shuffle=False)
    again.load_state_dict(loader.state_dict())
    assert next(again.steps()).batch[1].tolist() == [2, 3]

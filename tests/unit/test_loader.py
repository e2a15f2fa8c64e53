"""What each rank is given: the plan's samples, from memory or a DataLoader, and padding batches where none is left."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from trainer.cluster.world import World
from trainer.data import order
from trainer.data.batches import Step
from trainer.data.loader import InMemory, ShardedLoader
from trainer.data.shard_plan import permutation
from trainer.errors import ConfigError
from trainer.loop.batches import Batches
from trainer.models.global_batch import GlobalBatch


class Pairs(Dataset[Any]):
    """A map-style dataset like any user's: a numpy array and a tensor per sample."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self._inputs: npt.NDArray[Any] = inputs.numpy()
        self._targets = targets

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[Any], Tensor]:
        return self._inputs[index], self._targets[index]


class Endless(IterableDataset[Any]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def numbered(samples: int) -> InMemory:
    """Sample i has the inputs (i, -i) and the target i."""
    places = torch.arange(samples)
    return InMemory(torch.stack([places, -places], dim=1).float(), places)


def world(rank: int, size: int) -> World:
    return World(rank=rank, size=size, local_rank=rank, local_size=size)


def steps_of(loader: ShardedLoader) -> list[Step]:
    return list(loader.steps())


@settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(1, 60),
    size=st.integers(1, 5),
    batch_size=st.integers(1, 9),
    accumulate=st.integers(1, 3),
    in_memory=st.booleans(),
    is_table=st.booleans(),
)
def test_all_ranks_have_the_same_steps_and_take_every_sample_once(
    samples: int, size: int, batch_size: int, accumulate: int, in_memory: bool, is_table: bool
) -> None:
    data = numbered(samples)
    dataset = data if in_memory else Pairs(data.inputs, data.targets)
    with mock.patch.object(order, "_LARGEST_TABLE", 60 if is_table else 0):
        ranks = [
            steps_of(ShardedLoader(dataset, batch_size, accumulate=accumulate, world=world(rank, size)))
            for rank in range(size)
        ]
    assert len({len(steps) for steps in ranks}) == 1
    assert len({tuple(step.closes_update for step in steps) for steps in ranks}) == 1
    targets = [target for steps in ranks for step in steps for target in step.batch[1][: step.count].tolist()]
    assert sorted(targets) == list(range(samples))


class Numbers(Dataset[int]):
    """So many samples as no table of them would fit into the memory."""

    def __len__(self) -> int:
        return 10**13

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_any_number_of_samples_takes_no_table_and_other_ranks_go_on_within_its_epoch(workers: int) -> None:
    whole = [batch.tolist() for batch in itertools.islice(ShardedLoader(Numbers(), 6), 50)]
    assert len({sample for batch in whole for sample in batch}) == 300
    two = [ShardedLoader(Numbers(), 3, world=world(rank, 2), num_workers=workers) for rank in range(2)]
    pairs = itertools.islice(zip(*two, strict=True), 40)
    assert [[*first.tolist(), *second.tolist()] for first, second in pairs] == whole[:40]
    again = ShardedLoader(Numbers(), 6)
    again.load_state_dict({**ShardedLoader(Numbers(), 1).state_dict(), "taken": 240, "shuffle": "computed"})
    assert [batch.tolist() for batch in itertools.islice(again, 10)] == whole[40:]


def weighted(generator: torch.Generator | None) -> WeightedRandomSampler:
    return WeightedRandomSampler([0.0, 1.0, 9.0, 0.0, 1.0], num_samples=40, generator=generator)


@pytest.mark.parametrize("generators", [True, False])
def test_all_ranks_take_what_a_sampler_has_drawn_and_each_epoch_draws_anew(generators: bool) -> None:
    drawn = []
    for rank in range(3):
        torch.manual_seed(rank)  # the ranks' own numbers differ, and are not touched
        before = torch.random.get_rng_state()
        sampler = weighted(torch.Generator().manual_seed(rank) if generators else None)
        loader = ShardedLoader(numbered(5), 4, world=world(rank, 3), sampler=sampler, seed=7)
        drawn.append([[step.batch[1].tolist() for step in loader.steps() if step.count] for _ in range(2)])
        assert torch.equal(torch.random.get_rng_state(), before)
    for epoch in range(2):
        counts = [sum(batch.count(sample) for rank in drawn for batch in rank[epoch]) for sample in range(5)]
        assert sum(counts) == 40
        assert counts[0] == counts[3] == 0
        assert counts[2] > 25
    assert drawn[0][0] != drawn[0][1]
    alone = ShardedLoader(numbered(5), 12, sampler=weighted(None), seed=7)
    together = [[sample for rank in drawn for sample in rank[0][step]] for step in range(3)]
    assert together == [step.batch[1].tolist() for step in alone.steps()][:3]


def test_a_sampler_that_draws_too_little_is_told() -> None:
    class Short(list[int]):
        def __len__(self) -> int:
            return 4

    with pytest.raises(ConfigError, match="the sampler has drawn 2 samples, and its length is 4"):
        list(ShardedLoader(numbered(5), 2, sampler=Short([0, 1])))


@pytest.mark.parametrize("options", [{"batch_size": 2, "sampler": 3}, {"batch_sampler": [3]}])
def test_a_sampler_that_does_not_end_is_told(options: dict[str, Any]) -> None:
    class Cycle(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            return itertools.repeat(self[0])

    *_, (name, drawn) = options.items()
    made: dict[str, Any] = {**options, name: Cycle([drawn])}
    with pytest.raises(ConfigError, match="Cycle has a length of 1, and no end after 1010 draws"):
        list(ShardedLoader(numbered(5), **made))


def test_many_draws_with_replacement_are_made_when_they_are_needed() -> None:
    sampler = RandomSampler(numbered(5), replacement=True, num_samples=10**10)
    ranks = [ShardedLoader(numbered(5), 50, sampler=sampler, world=world(rank, 2)) for rank in range(2)]
    drawn = [next(loader.steps()).batch[1].tolist() for loader in ranks]
    assert len(ranks[0]) == 10**8
    assert {*drawn[0]} == {*drawn[1]} == {*range(5)}
    alone = ShardedLoader(numbered(5), 100, sampler=sampler)
    assert next(alone.steps()).batch[1].tolist() == drawn[0] + drawn[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_drop_last_leaves_out_what_does_not_fill_a_step_of_all_ranks(rank: int) -> None:
    loader = ShardedLoader(numbered(11), 2, world=world(rank, 2), drop_last=True, seed=3)
    assert len(loader) == 2
    for epoch in range(2):
        order = permutation(11, epoch=epoch, seed=3)
        batches = [step.batch[1].tolist() for step in loader.steps()]
        assert batches == [order[start + 2 * rank : start + 2 * rank + 2].tolist() for start in (0, 4)]


class Incomplete(Dataset[Any]):
    """Samples, of which the first cannot be read."""

    def __len__(self) -> int:
        return 5

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [torch.tensor([float(index)]) for index in indices if index]


@pytest.mark.parametrize("size", [2, np.int64(2)])
def test_a_step_counts_the_samples_that_were_loaded_and_a_padding_batch_is_known_by_none(size: int) -> None:
    global_batch, counts = GlobalBatch(lambda tensor: tensor), []
    loader = ShardedLoader(Incomplete(), size, shuffle=False, world=world(1, 2))
    loader.observers.append(Batches(loader.world, 1, global_batch))
    for step in loader.steps():
        counts.append((step.count, global_batch.counts))
    assert counts == [(2, True), (0, False)]
    assert [step.count for step in ShardedLoader(Incomplete(), size, shuffle=False, world=world(0, 2)).steps()] == [
        1,
        1,
    ]


def test_a_view_of_a_batch_is_known_for_it_though_others_were_drawn_since() -> None:
    loader = ShardedLoader(InMemory(torch.ones(7, 2), torch.zeros(7)), 2, world=world(0, 2))
    batches = Batches(loader.world, 1, GlobalBatch(lambda tensor: tensor))
    loader.observers.append(batches)
    first, second = loader.steps()
    assert first.weight == 1.0 < second.weight
    batches.on_forward((first.batch[0].view(1, 4),))
    assert batches.current.weight == 1.0


@pytest.mark.parametrize("in_memory", [True, False])
def test_going_through_an_epoch_draws_no_random_numbers_from_the_model(in_memory: bool) -> None:
    # Dropout takes its masks from the same generator: it must not depend on where the samples come from.
    data = numbered(8)
    before = torch.random.get_rng_state()
    loader = ShardedLoader(data if in_memory else Pairs(data.inputs, data.targets), 4)
    assert len(steps_of(loader)) == 2
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_transform_sees_cut_batches_and_the_data_stay_as_they_are() -> None:
    shapes: list[tuple[int, ...]] = []

    def halve(images: Tensor) -> Tensor:
        shapes.append(tuple(images.shape))
        return images.float() / 2

    data = InMemory(torch.arange(10, dtype=torch.uint8).reshape(5, 2), torch.arange(5), halve)
    steps = steps_of(ShardedLoader(data, 2, shuffle=False))
    assert shapes == [(2, 2), (2, 2), (1, 2)]
    assert steps[1].batch[0].tolist() == [[2.0, 2.5], [3.0, 3.5]]
    assert data.inputs.dtype == torch.uint8


def test_inputs_and_targets_of_different_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 inputs but 4 targets"):
        InMemory(torch.zeros(3), torch.zeros(4))


def test_a_dataset_without_a_length_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="Endless cannot be sharded exactly"):
        ShardedLoader(Endless(), 1)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="samples is 0"):
        ShardedLoader(numbered(0), 1)


@pytest.mark.parametrize("name", ["batch_size", "global_batch_size"])
@pytest.mark.parametrize("size", ["8", 8.0])
def test_a_size_that_is_no_integer_is_one_line(name: str, size: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {size!r}; it must be an integer of at least 1"):
        ShardedLoader(Pairs(torch.zeros(8, 2), torch.zeros(8)), **{name: size})

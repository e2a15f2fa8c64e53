"""Batches that a batch sampler, or the dataset, has made: whole, each on one rank, and weighed by their samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, Sampler, SubsetRandomSampler

from tests.unit.test_loader import numbered, world
from tests.unit.test_stream import FIRST_OF_TWO, Numbers, TwoRanks
from trainer import ConfigError, ShardedLoader, StreamLoader, TrainerError
from trainer.cluster.world import World
from trainer.data.batches import Step


class Rows(Dataset[int]):
    """A dataset whose samples are their own numbers, or whatever they are asked for by."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: Any) -> Any:
        return index


class Buckets(Sampler[list[int]]):
    """Batches of one to three of 20 samples, other ones in each epoch, and more in some than in others.

    Args:
        source: what draws: "python", "numpy", "torch", a generator of its own of these, or "epoch".
    """

    def __init__(self, source: str = "python") -> None:
        self._source = source
        self.generator: Any = {"own numpy": np.random.default_rng(), "own torch": torch.Generator()}.get(source)
        self._epoch = random.randrange(10**6)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return 10

    def _integer(self) -> int:
        draws: dict[str, Callable[[], int]] = {
            "python": lambda: random.randrange(10**6),
            "numpy": lambda: int(np.random.randint(10**6)),
            "torch": lambda: int(torch.randint(10**6, ())),
            "own numpy": lambda: int(self.generator.integers(10**6)),
            "own torch": lambda: int(torch.randint(10**6, (), generator=self.generator)),
            "epoch": lambda: self._epoch + 1,
        }
        return draws[self._source]()

    def __iter__(self) -> Iterator[list[int]]:
        order = random.Random(self._integer())
        rest = order.sample(range(20), 20)
        while rest:
            size = order.randint(1, 3)
            yield rest[:size]
            rest = rest[size:]


class Ready(Dataset[Any]):
    """A dataset of batches, of the lengths that are given."""

    def __init__(self, *sizes: int) -> None:
        ends = np.cumsum(sizes).tolist()
        self._batches = [torch.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": index, "x": self._batches[index]}


def rows(steps: Iterator[Step]) -> list[tuple[list[int], int, float, bool]]:
    return [(step.batch.tolist(), step.count, step.weight, step.closes_update) for step in steps]


BATCHES = [[0, 1, 2], [3], [4, 5], [6, 7], [8]]


def test_each_batch_goes_to_one_rank_and_a_step_takes_as_many_as_there_are_ranks() -> None:
    loaders = [ShardedLoader(Rows(9), batch_sampler=BATCHES, world=world(rank, 2)) for rank in range(2)]
    assert [len(loader) for loader in loaders] == [3, 3]
    assert rows(loaders[0].steps()) == [([0, 1, 2], 3, 6 / 4, True), ([4, 5], 2, 1.0, True), ([8], 1, 2.0, True)]
    # The padding batch is the first batch, whole: a loss over episodes or pairs cannot do with a part of one.
    assert rows(loaders[1].steps()) == [([3], 1, 2 / 4, True), ([6, 7], 2, 1.0, True), ([0, 1, 2], 0, 0.0, True)]
    of_one = ShardedLoader(Rows(9), batch_sampler=[[8], [4, 5], [1]], world=world(1, 2))
    assert rows(of_one.steps())[-1] == ([8], 0, 0.0, True)
    for loader in loaders:  # an evaluation has no padding
        loader.training = False
    assert [batch.tolist() for loader in loaders for batch in loader] == [[0, 1, 2], [4, 5], [8], [3], [6, 7]]


@settings(deadline=None, max_examples=80)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=20),
    ranks=st.integers(1, 5),
    accumulate=st.integers(1, 3),
    in_memory=st.booleans(),
)
def test_n_ranks_weigh_as_one_that_accumulates_n_times_as_many(
    sizes: list[int], ranks: int, accumulate: int, in_memory: bool
) -> None:
    ends = np.cumsum(sizes).tolist()
    batches = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    data = numbered(ends[-1]) if in_memory else Rows(ends[-1])

    def updates_of(world: World, accumulate: int) -> list[list[tuple[float, int]]]:
        loader = ShardedLoader(data, batch_sampler=batches, world=world, accumulate=accumulate)
        updates: list[list[tuple[float, int]]] = [[]]
        for step in loader.steps():
            batch = step.batch[1] if in_memory else step.batch
            # Each sample's share in the mean over ranks of the weighed means.
            updates[-1] += [(step.weight / step.count / world.size, int(one)) for one in batch if step.count]
            if step.closes_update:
                updates.append([])
        assert updates.pop() == []
        return updates

    alone = updates_of(world(0, 1), accumulate * ranks)
    together = [updates_of(world(rank, ranks), accumulate) for rank in range(ranks)]
    for expected, *found in zip_longest(alone, *together):
        shares = sorted((sample, share) for update in found for share, sample in update)
        assert shares == [(sample, pytest.approx(share)) for share, sample in expected]
        assert sum(share for _, share in shares) == pytest.approx(1.0)


SOURCES = ["python", "numpy", "torch", "own numpy", "own torch", "epoch"]


@pytest.mark.parametrize("source", SOURCES)
def test_an_epochs_batches_are_the_same_on_any_number_of_ranks_and_other_ones_in_the_next(source: str) -> None:
    def epochs_of(ranks: int) -> list[list[list[int]]]:
        loaders = [
            ShardedLoader(Rows(20), batch_sampler=Buckets(source), world=world(rank, ranks)) for rank in range(ranks)
        ]
        epochs = []
        for _ in range(2):
            random.seed()  # what a model draws meanwhile
            torch.manual_seed(random.randrange(1000))
            steps = zip(*(loader.steps() for loader in loaders), strict=True)
            epochs.append([step.batch.tolist() for together in steps for step in together if step.count])
            assert all(len(loader) == -(-len(epochs[-1]) // ranks) for loader in loaders), "of the epoch that was drawn"
        return epochs

    first, second = epochs_of(1)
    assert epochs_of(3) == [first, second]
    assert sorted(sample for batch in first for sample in batch) == list(range(20))
    assert first != second


def test_the_samplers_within_one_are_seeded_and_told_of_the_epoch() -> None:
    class Told(SubsetRandomSampler):
        epochs: list[int] = []  # noqa: RUF012 (of all)

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    def batches_of(sampler: Any) -> list[list[int]]:
        loader = ShardedLoader(Rows(9), batch_sampler=BatchSampler(sampler, 2, True))
        return [batch.tolist() for _ in range(2) for batch in loader]

    drawn = [batches_of(Told(range(9), torch.Generator().manual_seed(seed))) for seed in (1, 2)]
    assert drawn[0] == drawn[1]
    assert drawn[0][:4] != drawn[0][4:]
    assert Told.epochs == [0, 1, 0, 1]
    assert len(batches_of(DistributedSampler(Rows(9), 1, 0))) == 8, "which takes all of them"


def test_a_sampler_is_seeded_without_the_generators_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    # These are not restored, and ranks that are seeded alike would draw the same dropout from then on.
    for name in ("manual_seed", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, pytest.fail)
    assert len(list(ShardedLoader(Rows(4), 2, sampler=torch.randperm(4).tolist()))) == 2


@pytest.mark.parametrize("drawn", [[3], [[]], ["ab"]])
def test_what_is_no_batch_is_told(drawn: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"the batch sampler has drawn .*; a batch is a list of at least one index"):
        list(ShardedLoader(Rows(4), batch_sampler=drawn))


def test_a_position_in_batches_goes_on_with_any_number_of_ranks() -> None:
    def loaders_of(ranks: int) -> list[ShardedLoader]:
        return [
            ShardedLoader(Rows(20), batch_sampler=Buckets(), world=world(rank, ranks), seed=4) for rank in range(ranks)
        ]

    (alone,) = loaders_of(1)
    whole = [[step.batch.tolist() for step in alone.steps()] for _ in range(2)]
    found, state = [], None
    for ranks in (2, 3, 1):
        loaders = loaders_of(ranks)
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            assert loader.state_dict() == (state or loader.state_dict())
        for number, steps in enumerate(zip(*(loader.steps() for loader in loaders), strict=True)):
            found += [step.batch.tolist() for step in steps if step.count]
            state = loaders[-1].state_dict()
            if number == 0 and ranks > 1:
                break
    assert found == whole[0]
    assert [step.batch.tolist() for step in loaders[0].steps()] == whole[1]
    # A checkpoint after the last update of an epoch knows that it is the last one, whatever the sampler's length.
    again = loaders_of(1)[0]
    again.load_state_dict(state)  # type: ignore[arg-type]
    assert again.start == again.epoch_samples == len(whole[0]) != len(Buckets())


@pytest.mark.parametrize("keyword", ["sampler", "batch_sampler"])
def test_what_an_interrupted_run_drew_has_to_be_drawn_again(keyword: str) -> None:
    class Other(list[Any]):
        drawn = 0

        def __iter__(self) -> Iterator[Any]:
            Other.drawn += 1
            return iter(self[:] if Other.drawn == 1 else self[::-1])

    sampler = Other(range(4) if keyword == "sampler" else [[0], [1], [2], [3]])
    interrupted, again, later = (
        ShardedLoader(Rows(4), 1, sampler=sampler)
        if keyword == "sampler"
        else ShardedLoader(Rows(4), batch_sampler=sampler)
        for _ in range(3)
    )
    passing = interrupted.steps()
    next(passing)
    for loader in (again, later):
        loader.load_state_dict(interrupted.state_dict())
    with pytest.raises(
        ConfigError, match=r"Other has drawn something else for epoch 0 \(from 0\) than in the run that"
    ):
        list(again.steps())
    later.epoch, later.start = 1, 0  # as where the loop has not asked for the end of the epoch
    assert len(list(later.steps())) == 4


def test_a_position_in_samples_is_none_in_batches() -> None:
    sampled = ShardedLoader(Rows(4), 1, sampler=[0, 1, 2, 3])
    batched = ShardedLoader(Rows(4), batch_sampler=[[0], [1], [2], [3]])
    ready = ShardedLoader(Rows(4), batch_size=None)
    for one, other in ((sampled, batched), (batched, sampled), (ready, ShardedLoader(Rows(4), 1)), (ready, batched)):
        with pytest.raises(ConfigError, match=r"position holds for (unit|shuffle)"):
            other.load_state_dict({**one.state_dict(), "taken": 2})


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_of_batches_is_weighed_by_the_length_of_their_first_tensors(workers: int) -> None:
    def steps_of(rank: int, **options: Any) -> list[Step]:
        group = TwoRanks(None, *((1, 1, 0) if rank == 0 else (3, 4, 2)))  # what the other one has in each update
        loader = ShardedLoader(
            Ready(3, 1, 4, 1, 2), batch_size=None, world=world(rank, 2), group=group, num_workers=workers, **options
        )
        assert (len(loader), loader.epoch_samples, loader.dataset_length) == (3, 5, 5)
        return list(loader.steps())

    first, second = steps_of(0, shuffle=False), steps_of(1, shuffle=False)
    assert [(step.batch["number"], step.count, step.weight) for step in first] == [
        (0, 3, 6 / 4), (2, 4, 8 / 5), (4, 2, 2.0)
    ]  # fmt: skip
    assert [(step.batch["number"], step.count, step.weight) for step in second] == [
        (1, 1, 2 / 4), (3, 1, 2 / 5), (0, 0, 0.0)
    ]  # fmt: skip
    assert [step.taken for step in second] == [2, 4, 5]
    assert [step.batch["number"] for step in steps_of(0, sampler=[4, 3, 2, 1, 0])] == [4, 2, 0]


def test_a_batch_that_does_not_tell_its_samples_counts_for_what_it_is_said_to() -> None:
    data = [{"text": "abc"}, {"text": "d"}]
    with pytest.raises(TrainerError, match="no tensor in a batch of type dict tells how many samples it has; say what"):
        list(ShardedLoader(data, batch_size=None))
    loader = ShardedLoader(data, None, shuffle=False, accumulate=2, weigh_by=lambda batch: len(batch["text"]))
    assert [step.weight for step in loader.steps()] == [3 / 4, 1 / 4]
    assert list(ShardedLoader(data, None, training=False)) == data


class Batches(Numbers):
    """A stream of batches: of each of its numbers as many, and at least one."""

    def __iter__(self) -> Iterator[Any]:
        return (torch.full((max(1, number),), number) for number in super().__iter__())


def test_a_stream_of_batches_is_weighed_by_their_samples_too() -> None:
    # The other rank has drawn batches of 4 and 2 samples, then one of 1 sample, then nothing.
    group = TwoRanks(3, [1, 1], [6], [1, 0], [1], [0, 0])
    loader = StreamLoader(Batches(0, 4), None, accumulate=2, world=FIRST_OF_TWO, group=group, already_sharded=True)
    assert (len(loader), loader.epoch_samples) == (4, 7)
    steps = [(step.batch.tolist(), step.count, step.weight, step.taken) for step in loader.steps()]
    assert steps == [([0], 1, 2 / 8, 2), ([1], 1, 2 / 8, 4), ([2, 2], 2, 4 / 6, 6), ([3, 3, 3], 3, 6 / 6, 7)]
    assert [batch.tolist() for batch in StreamLoader(Batches(0, 3), None, training=False)] == [[0], [1], [2, 2]]

"""Streams: what one rank draws, and what is refused. Real ranks are in tests/distributed/checks_handle_streams.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

from trainer.cluster.world import World
from trainer.data.base import is_stream
from trainer.data.batches import Step
from trainer.data.stream import StreamLoader
from trainer.errors import ConfigError, TrainerError


class Numbers(IterableDataset[int]):
    """The numbers from `first` to `last` - 1; a rank's part is every N-th of them."""

    def __init__(self, first: int, last: int, step: int = 1) -> None:
        self._range = range(first, last, step)
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(self._range)

    def __len__(self) -> int:
        return len(self._range)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def shard(self, num_shards: int, index: int) -> Numbers:
        part = self._range[index::num_shards]
        return Numbers(part.start, part.stop, part.step)


class Columns(Numbers):
    """A stream that has columns by name, as those of Hugging Face."""

    def __getitem__(self, name: str) -> Columns:  # type: ignore[override]
        return self


class OfRows:
    """The same without torch's class, and without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __getitem__(self, name: str) -> OfRows:
        return self


def test_what_has_columns_is_a_stream_and_what_has_places_and_a_length_is_not() -> None:
    assert all(map(is_stream, (Numbers(0, 3), Columns(0, 3), OfRows(), (number for number in range(3)))))
    assert not any(map(is_stream, ([1, 2], TensorDataset(torch.ones(2)), range(3))))


class Divided(Numbers):
    """Each worker yields its own part."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(self._range[worker.id :: worker.num_workers] if worker else self._range)


class TwoRanks:
    """The group of rank 0, whose neighbour draws what is written down here."""

    def __init__(self, length: int | None, *drawn: list[int] | int) -> None:
        self._length, self._drawn = length, list(drawn)

    def all_reduce(self, value: Tensor, reduction: str) -> Tensor:
        return value + torch.tensor(self._drawn.pop(0))

    def all_gather(self, value: Any) -> list[Any]:
        return [value, self._length]

    def broadcast(self, value: Any) -> Any:
        return value

    def average_weights(self) -> None:
        return


FIRST_OF_TWO = World(rank=0, size=2, local_rank=0, local_size=2)


def rows(steps: Iterator[Step]) -> list[tuple[list[int], int, float, bool]]:
    return [(step.batch.tolist(), step.count, step.weight, step.closes_update) for step in steps]


def test_a_stream_is_cut_into_batches_in_its_own_order_in_every_epoch() -> None:
    numbers = Numbers(0, 5)
    loader = StreamLoader(numbers, 2)
    assert len(loader) == 3
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert numbers.epochs == [0, 1]
    assert [batch.tolist() for batch in StreamLoader(numbers, 2, training=False)] == [[0, 1], [2, 3], [4]]
    assert [batch.tolist() for batch in StreamLoader(numbers, 2, drop_last=True)] == [[0, 1], [2, 3]]
    assert [batch.tolist() for batch in StreamLoader({1: "a", 2: "b"}.keys(), 2)] == [[1, 2]]


def test_steps_are_weighed_by_the_samples_of_all_ranks_in_the_update() -> None:
    # The other rank has drawn 2, 2, then 2, 1, then 1, nothing.
    group = TwoRanks(None, [2, 2], [2, 1], [1, 0])
    loader = StreamLoader(Numbers(0, 16), 2, accumulate=2, world=FIRST_OF_TWO, group=group)
    steps = rows(loader.steps())
    assert steps == [
        ([0, 2], 2, 4 / 8, False),
        ([4, 6], 2, 4 / 8, True),
        ([8, 10], 2, 4 / 7, False),
        ([12, 14], 2, 4 / 7, True),
        ([12, 14], 0, 0.0, True),  # this rank's part has ended: the last batch again
    ]
    assert loader.samples == 8 + 7 + 1


def test_without_the_last_steps_an_epoch_ends_where_one_rank_cannot_fill_its_batch() -> None:
    group = TwoRanks(6, [2, 2], [2, 0])
    loader = StreamLoader(Numbers(0, 21), 2, accumulate=2, drop_last=True, world=FIRST_OF_TWO, group=group,
                          already_sharded=True)  # fmt: skip
    assert [step.batch.tolist() for step in loader.steps()] == [[0, 1], [2, 3], [4, 5]]
    assert len(loader) == 3


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_divide_the_stream_give_each_sample_once(workers: int) -> None:
    batches = [batch.tolist() for batch in StreamLoader(Divided(0, 9), 2, num_workers=workers)]
    assert sorted(number for batch in batches for number in batch) == list(range(9))


def test_workers_that_all_yield_the_whole_stream_are_told() -> None:
    with pytest.raises(TrainerError, match="has yielded 12 samples, and its length is 6; with several workers"):
        list(StreamLoader(Numbers(0, 6), 2, num_workers=2))


def test_a_rank_without_a_sample_is_told() -> None:
    loader = StreamLoader(Numbers(0, 0), 2, world=FIRST_OF_TWO, group=TwoRanks(None, [2]), already_sharded=True)
    with pytest.raises(TrainerError, match="the stream of rank 0 is empty"):
        list(loader)


def test_an_epoch_without_a_step_is_told() -> None:
    for drop_last in (False, True):
        with pytest.raises(TrainerError, match="no samples for a step of this epoch"):
            list(StreamLoader(Numbers(0, 0), 2, drop_last=drop_last))


def test_workers_see_each_epoch_of_a_stream_that_counts_them() -> None:
    class Counted(Numbers):
        def __iter__(self) -> Iterator[int]:
            return iter(self.epochs[-1:])

        def __len__(self) -> int:
            raise TypeError

    loader = StreamLoader(Counted(0, 1), 1, num_workers=1, persistent_workers=True)
    assert [batch.tolist() for _ in range(3) for batch in loader] == [[0], [1], [2]]


@pytest.mark.parametrize("count", [-1, float("nan"), torch.zeros(2), None])
def test_what_a_batch_counts_for_is_a_number(count: Any) -> None:
    with pytest.raises(TrainerError, match=r"weigh_by has returned .* it takes a number that is at least 0"):
        list(StreamLoader(Numbers(0, 4), 2, weigh_by=lambda _: count))


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Numbers(0, 4), {}, "either batch_size .* or global_batch_size"),
        (Numbers(0, 4), {"batch_size": 0}, "batch size is 0; it must be at least 1"),
        (Numbers(0, 4), {"global_batch_size": 1}, "for a stream it must be at least 1 per rank, 2"),
        (
            Numbers(0, 4),
            {"batch_size": 2, "shuffle": True},
            "the loader of a stream has no option 'shuffle'; valid are",
        ),
        (iter([1, 2]), {"batch_size": 2}, "list_iterator is an iterator, which ends with the first epoch"),
        (Numbers(0, 4), {"batch_size": 2, "training": False, "weigh_by": len}, "weigh_by is for training"),
        (Numbers(0, 8), {"batch_size": 2}, r"Numbers has 8 samples, and its shard\(\) gives the ranks 4 \+ 5 = 9"),
    ],
)
def test_a_stream_that_cannot_be_shared_exactly_is_refused(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamLoader(dataset, world=FIRST_OF_TWO, group=TwoRanks(5), **options)

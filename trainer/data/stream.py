"""The loader of an iterable dataset (a stream), whose samples cannot be asked for by index: this rank's batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Unpack

import torch
from torch.utils.data import IterableDataset, get_worker_info

from trainer.cluster.world import World
from trainer.data.base import NOT_GIVEN, Loader, LoaderOptions, check_sizes, is_stream
from trainer.data.batches import Step, batches_of, move
from trainer.data.shard_plan import permutation
from trainer.errors import ConfigError, TrainerError


class StreamLoader(Loader):
    """Loader of this rank's part of a stream; iterating yields an epoch of batches on the rank's device.

    The parts may differ in length. In training the ranks add up what each has drawn, once per update. So all of them
    take the same number of steps, until no rank has samples left, and `Run.backward` weighs each: the mean over ranks
    is the mean over samples. A rank whose part has ended repeats its last batch with weight 0. In an evaluation each
    sample comes once, and a rank may get fewer batches than another.

    A stream of batches yields a batch for each step of the rank. It counts for its samples: the length of the first
    dimension of the first tensor in it. Positions and lengths are then counted in batches.

    Args:
        dataset: an iterable dataset with `shard(num_shards, index)`, which returns a rank's part, as those of
            Hugging Face have it. If it has `set_epoch(epoch)`, that is called before each epoch.
        batch_size: samples per rank and step; None (given, not left out) for a stream of batches.
        global_batch_size: samples of all ranks and step, instead of `batch_size`.
        already_sharded: take the dataset as it is, because it is this rank's part already. It may be a map-style
            dataset then, which is shuffled in training.
        training: False for an evaluation.
        drop_last: end the epoch before the first step that the ranks cannot fill.
        options: what every loader takes, such as `weigh_by` and `collate_fn`; see `Loader`. Each of `num_workers`
            processes iterates over the dataset, which has to give each a different part
            (`torch.utils.data.get_worker_info`), as with torch's DataLoader.

    Raises:
        ConfigError: a number is not valid, the stream cannot be sharded, or an option is not valid.
    """

    kind, takes = "the loader of a stream", ("already_sharded",)

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = NOT_GIVEN,
        *,
        global_batch_size: int | None = None,
        already_sharded: bool = False,
        training: bool = True,
        drop_last: bool = False,
        **options: Unpack[LoaderOptions],
    ) -> None:
        is_ready = check_sizes(batch_size, global_batch_size, drop_last=drop_last)
        super().__init__(is_ready, training=training, drop_last=drop_last, **options)
        sizes = _batch_sizes(1 if self._is_ready else batch_size, global_batch_size, self.world.size)
        self.step_size = sum(sizes)
        if already_sharded and not is_stream(dataset):
            dataset = _Items(dataset, self.seed, shuffle=training)
        self.dataset = _part(dataset, self.world, already_sharded=already_sharded)
        self.samples = 0
        """Units (samples, or batches of a stream of these) that all ranks have drawn in this epoch of a training."""
        self._steps_taken = 0
        self._epoch_samples: int | None = None
        self._steps: int | None = None
        self._length = _length(self.dataset)
        lengths = self._group.all_gather(self._length) if self._group else [self._length]
        known = [length for length in lengths if length is not None]
        if len(known) == len(lengths):
            if not already_sharded:
                _check_lengths(dataset, known)
            self._epoch_samples = sum(known)
            full = [length // size for length, size in zip(known, sizes, strict=True)]
            begun = [-(-length // size) for length, size in zip(known, sizes, strict=True)]
            self._steps = min(full) if drop_last else max(begun)
        if hasattr(self.dataset, "set_epoch"):
            self._options.pop("persistent_workers", None)  # they would keep the dataset of the first epoch
        self._batches = self._make_data_loader(
            self.dataset if isinstance(self.dataset, IterableDataset) else _Iterable(self.dataset),
            batch_size=None if self._is_ready else sizes[self.world.rank],
            drop_last=drop_last,
        )

    @property
    def epoch_samples(self) -> int | None:
        return self._epoch_samples

    def samples_after(self, steps: int) -> int:
        return self.samples if self.training else steps * self.step_size

    @property
    def must_agree(self) -> dict[str, Any]:
        return {f"{self.unit} per step": self.step_size, "drop_last": self.drop_last}

    def __len__(self) -> int:
        """Return the steps in an epoch with at most one worker, the same on every rank.

        Raises:
            TypeError: a rank's part has no length.
        """
        if self._steps is None:
            raise TypeError("the loader of a stream without __len__ has no length either")
        return self._steps

    def _evaluation_steps(self) -> Iterator[Step]:
        return self._draw(self.world.device)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self._steps_taken if self.taken or self.start else 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._steps_taken = state["steps"]

    def _position_depends_on(self, is_within: bool) -> dict[str, Any]:
        # Each rank knows only of its part of the stream which sample comes next.
        within = {"world size": self.world.size, f"{self.unit} per step": self.step_size} if is_within else {}
        return {**within, self.unit: self._epoch_samples}

    def _all_steps(self) -> Iterator[Step]:
        batches, epoch = self._draw(), self.epoch
        batch: Any = None
        self.samples = self.start
        self._steps_taken = self._steps_taken if self.samples else 0
        for _ in range(self._steps_taken):
            batch = next(batches, Step(batch, 0)).batch
        self._begin(self.samples)
        totals = [0] * self.accumulate
        while len(totals) == self.accumulate:
            drawn = list(islice(batches, self.accumulate))
            totals = self._totals(drawn)
            if not totals and self.samples == 0:
                raise TrainerError(f"the ranks' streams have no {self.unit} for a step of this epoch")
            for index, total in enumerate(totals):
                # Once this rank's part has ended, its last batch comes again, with weight 0.
                step = drawn[index] if index < len(drawn) else Step(batch, 0)
                count, batch = step.count, step.batch
                if batch is None:
                    raise TrainerError(f"the stream of rank {self.world.rank} is empty; each rank needs a sample")
                self.samples += total
                self._steps_taken += 1
                weight, is_last = count * self.world.size / sum(totals), index == len(totals) - 1
                yield Step(move(batch, self.world.device), count, weight, is_last, epoch, self.samples)

    def _totals(self, drawn: Sequence[Step]) -> list[int]:
        """Return the units of all ranks in each step of the update; fewer where the epoch ends. Collective."""
        units = [1 if self._is_ready else step.count for step in drawn] + [0] * (self.accumulate - len(drawn))
        if self._group is not None:
            units = self._group.all_reduce(torch.tensor(units), "sum").tolist()
        least = self.step_size if self.drop_last else 1
        return units[: next((index for index, total in enumerate(units) if total < least), None)]

    def _draw(self, device: torch.device | None = None) -> Iterator[Step]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        batches = batches_of(self._batches, self.seed, self.epoch, self.world.rank)
        self.epoch += 1
        drawn = 0
        for step in self._counted(batches, device):
            drawn += 1 if self._is_ready else step.count
            yield step
        if self._length not in (None, drawn) and not self.drop_last:
            raise TrainerError(
                f"the stream of rank {self.world.rank} has yielded {drawn} {self.unit}, and its length is "
                f"{self._length}; with several workers each has to yield its own part "
                "(torch.utils.data.get_worker_info)"
            )


class _Iterable(IterableDataset[Any]):
    """An iterable dataset around any iterable, because DataLoader takes no other."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


class _Items(IterableDataset[Any]):
    """A rank's own map-style dataset as a stream, in a new order in every epoch of a training."""

    def __init__(self, dataset: Any, seed: int, *, shuffle: bool) -> None:
        self._dataset, self._seed, self._shuffle, self._epoch = dataset, seed, shuffle, 0

    def __len__(self) -> int:
        return len(self._dataset)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        length = len(self._dataset)
        order = permutation(length, epoch=self._epoch, seed=self._seed).tolist() if self._shuffle else range(length)
        info = get_worker_info()
        return map(self._dataset.__getitem__, order if info is None else order[info.id :: info.num_workers])


def _batch_sizes(batch_size: int | None, global_batch_size: int | None, ranks: int) -> list[int]:
    """Return each rank's units per step."""
    if global_batch_size is None:
        batch_size = batch_size or 0
        if batch_size < 1:
            raise ConfigError(f"batch size is {batch_size}; it must be at least 1")
        return [batch_size] * ranks
    if global_batch_size < ranks:
        raise ConfigError(
            f"global batch size is {global_batch_size}; for a stream it must be at least 1 per rank, {ranks}"
        )
    size, rest = divmod(global_batch_size, ranks)
    return [size + (rank < rest) for rank in range(ranks)]


def _part(dataset: Any, world: World, *, already_sharded: bool) -> Any:
    if hasattr(dataset, "__next__"):
        raise ConfigError(
            f"{type(dataset).__name__} is an iterator, which ends with the first epoch; give a dataset whose __iter__ "
            "begins anew"
        )
    if already_sharded or world.size == 1:
        return dataset
    if not hasattr(dataset, "shard"):
        raise ConfigError(
            f"{type(dataset).__name__} can only be iterated over, and has no shard(num_shards, index), so the ranks "
            "cannot divide it; if each rank has a stream of its own, say so with run.loader(…, already_sharded=True)"
        )
    return dataset.shard(num_shards=world.size, index=world.rank)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:  # what len raises without a __len__, and what such datasets raise where it is not known
        return None


def _check_lengths(dataset: Any, lengths: Sequence[int]) -> None:
    whole = _length(dataset)
    if whole is not None and sum(lengths) != whole:
        raise ConfigError(
            f"{type(dataset).__name__} has {whole} samples, and its shard() gives the ranks "
            f"{' + '.join(map(str, lengths))} = {sum(lengths)} of them"
        )

"""The loader of a map-style dataset: this rank's batches, from tensors in memory or through torch's DataLoader."""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from io import BytesIO
from itertools import repeat
from operator import itemgetter
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainer.data.base import NO_SAMPLES, NOT_GIVEN, Loader, LoaderOptions, check_sizes, is_stream
from trainer.data.batches import Step, batches_of
from trainer.data.order import Drawn, DrawnBatches, Epoch, EpochOrder, seed_globally, seeded
from trainer.data.permutation import Permutation
from trainer.data.shard_plan import ShardPlan
from trainer.errors import ConfigError
from trainer.watch.spans import loading

Batch = tuple[Any, Any]

_SPLIT = "which samples a Subset has (draw the split before run.prepare, or with a torch.Generator of its own)"
_ATTRIBUTES = ("samples", "targets", "indices", "files", "_fingerprint")
_MOST_CHECKED = 4096
"""Values of such an attribute that ranks compare, evenly spaced."""
_DRAWN, _DEEPEST = 8, 8
"""Items that ranks compare, and datasets within one another that are asked for their attributes."""
_LONGEST_S = 0.5
"""How long items are drawn for that; those that only some ranks have drawn are not compared."""


class InMemory(Dataset[Batch]):
    """A dataset whose inputs and targets are two tensors of the same length.

    Args:
        inputs: shape (samples, ...), any dtype; uint8 images stay uint8 until a batch is cut.
        targets: shape (samples, ...).
        transform: turns a cut batch of inputs into what the model takes, on the device (uint8 to float, say).

    Raises:
        ConfigError: the lengths differ.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, transform: Callable[[Tensor], Tensor] | None = None) -> None:
        if len(inputs) != len(targets):
            raise ConfigError(f"there are {len(inputs)} inputs but {len(targets)} targets")
        self.inputs = inputs
        self.targets = targets
        self.transform = transform

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int | Tensor) -> Batch:
        inputs = self.inputs[index]
        return (self.transform(inputs) if self.transform else inputs), self.targets[index]

    def to(self, device: torch.device) -> InMemory:
        """Return the same dataset with its tensors on `device`, moved once instead of batch by batch."""
        return InMemory(self.inputs.to(device), self.targets.to(device), self.transform)


class ShardedLoader(Loader):
    """Loader of this rank's shards; iterating yields an epoch of batches on the rank's device.

    In training every rank takes the same number of steps. `Run.backward` weighs each, so that N ranks compute exactly
    what a single process computes with an N times larger batch, whatever the size of the dataset. In an evaluation each
    sample comes once, and a rank may get fewer batches than another.

    Batches that a batch sampler or the dataset has made are not cut: each goes to a single rank, and a step takes as
    many as there are ranks, in the order of the epoch. Positions and lengths are counted in batches. In the mean of an
    update each counts for its samples: those whose indices the batch sampler has drawn, or, of a dataset of
    batches, the length of the first dimension of the first tensor in it.

    Args:
        dataset: `InMemory`, or any map-style dataset, such as a list.
        batch_size: samples per rank and step; None (given, not left out) for a dataset whose items are batches.
        global_batch_size: samples of all ranks and step, instead of `batch_size`.
        shuffle: a new order in every epoch, from `seed`; without it the order of the dataset. By default in training.
        sampler: draws the order of each epoch's samples, instead of `shuffle`: torch's WeightedRandomSampler, say.
        batch_sampler: draws each epoch's batches, as lists of indices: instead of a batch size and an order.
        training: False for an evaluation.
        drop_last: leave out the samples that do not fill the last step of all ranks.
        options: what every loader takes, such as `weigh_by`, `num_workers` and `collate_fn`; see `Loader`.

    Raises:
        ConfigError: a number is not valid, the dataset cannot be sharded, or an option is not an option of DataLoader.
    """

    takes = ("shuffle", "sampler", "batch_sampler")

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        batch_size: int | None = NOT_GIVEN,
        *,
        global_batch_size: int | None = None,
        shuffle: bool | None = None,
        sampler: Drawn | None = None,
        batch_sampler: DrawnBatches | None = None,
        training: bool = True,
        drop_last: bool = False,
        **options: Unpack[LoaderOptions],
    ) -> None:
        is_ready = check_sizes(batch_size, global_batch_size, batch_sampler, drop_last=drop_last)
        super().__init__(is_ready, training=training, drop_last=drop_last, **options)
        if isinstance(dataset, InMemory):
            self._check_in_memory()
        _check_order(shuffle, sampler, batch_sampler)
        if batch_sampler is not None:
            self.unit = "batches"
        self.dataset_length = _length(dataset)
        """Items in the dataset: samples, or batches if `batch_size` is None. A sampler may draw another number."""
        shuffle = training if shuffle is None else shuffle
        self._order = EpochOrder(
            self.dataset_length, shuffle=shuffle, sampler=sampler, batch_sampler=batch_sampler, group=self._group
        )
        self._is_drawn = sampler is not None or batch_sampler is not None
        self._whole_plan = self._make_plan(batch_size, global_batch_size)
        self.plan = self._plan_from(0)
        self.step_size = self.plan.step_size
        self._indices = _Indices()
        self.dataset = dataset.to(self.world.device) if isinstance(dataset, InMemory) else dataset

    def _make_plan(self, batch_size: int | None, global_batch_size: int | None) -> ShardPlan:
        return ShardPlan(
            samples=self._order.units,
            world_size=self.world.size,
            batch_size=1 if self.unit == "batches" or global_batch_size is not None else batch_size or 0,
            global_batch_size=global_batch_size,
            accumulate=self.accumulate,
        )

    def _check_in_memory(self) -> None:
        if self._options:
            name = next(iter(self._options))
            raise ConfigError(f"option {name!r} is for datasets that are loaded sample by sample; InMemory is not")
        if self._is_ready:
            raise ConfigError("batch_size=None is for a dataset whose items are batches, and those of InMemory are not")

    @property
    def epoch_samples(self) -> int:
        return self.plan.samples

    def samples_after(self, steps: int) -> int:
        return min(steps * self.step_size, self.plan.samples)

    @property
    def must_agree(self) -> dict[str, Any]:
        return {
            "samples of the dataset": self.dataset_length,
            _SPLIT: _checksums_of_attributes(self.dataset, ["indices"]).get("indices of Subset"),
            f"{self.unit} of an epoch": self.plan.samples,
            f"{self.unit} per step": self.step_size,
        }

    def digests(self) -> dict[str, int]:
        """Return checksums of some items, by their names; if these are random, of attributes that tell the samples.

        Each is drawn twice, with the same random numbers. With workers, a worker draws, because what a dataset opens
        for its first item may not survive a fork.
        """
        data: Any = self.dataset
        data = InMemory(data.inputs, data.targets) if isinstance(data, InMemory) else data  # a transform takes batches
        chosen = Permutation(self.dataset_length, 0).at(np.arange(min(self.dataset_length, _DRAWN), dtype=np.uint64))
        twice = [[place] for place in sorted(chosen.tolist()) for _ in range(2)]
        options = {"collate_fn": partial(digest, seed=0), "num_workers": min(self.num_workers, 1), "pin_memory": False}
        if self._options.get("multiprocessing_context") is not None:  # a spawned worker takes seconds to start
            return _checksums_of_attributes(data)
        drawn: list[Any] = []
        try:
            with seeded(0):
                data_loader = self._make_data_loader(data, batch_sampler=[twice[0], *twice], **options)
                until = time.monotonic() + _LONGEST_S
                for found in loading(batches_of(data_loader, 0)):
                    drawn.append(found)
                    if time.monotonic() > until:
                        break
            pairs = [*zip(drawn[1::2], drawn[2::2], strict=False)]  # the first is drawn with other random numbers
            if any(first != second for first, second in pairs):
                return _checksums_of_attributes(data)
            places = [place for [place] in twice[::2]]
            return {f"item {place} of the dataset": pair[0] for place, pair in zip(places, pairs, strict=False)}
        except Exception as error:  # it comes again where the item is needed
            error.__traceback__ = None  # which would keep the worker
            return {}

    def __len__(self) -> int:
        """Return the steps in an epoch, the same on every rank. In an evaluation a rank may have fewer."""
        return self.plan.steps

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if state["taken"] and self._order.drawn is not None:
            state |= {"units": self.plan.samples, "drawn": self._order.drawn}
        if self._order.own is not None:
            state["own_order"] = self._order.own.state(is_within=self.taken > 0)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if "drawn" in state:
            self._order.expect(state["drawn"])
            self._plan_for(state["units"])
        if self._order.own is not None:
            self._order.own.load_state(state["own_order"])

    def _position_depends_on(self, is_within: bool) -> dict[str, Any]:
        return {"samples": self.dataset_length, "shuffle": self._order.description, "seed": self._given_seed}

    def _plan_from(self, start: int) -> ShardPlan:
        plan = replace(self._whole_plan, start=start)
        return plan.full_steps() if self.drop_last else plan

    def _plan_for(self, units: int) -> None:
        """Plan for an epoch with another number of units than the last: a batch sampler may draw more, or fewer."""
        if self.unit == "batches" and units != self.plan.samples:
            self._whole_plan = replace(self._whole_plan, samples=units)
            self.plan = self._plan_from(0)

    def updates_before(self, taken: int) -> int:
        """Return the updates in which an epoch of this plan takes its first `taken` samples."""
        return -(-taken // (self.step_size * self.accumulate))

    def _all_steps(self) -> Iterator[Step]:
        start, epoch_number, rank = self.start, self.epoch, self.world.rank
        self._begin(start)
        epoch = self._begin_epoch()
        plan = self._plan_from(start)
        for number, step in enumerate(self._load(epoch, plan.shards(rank))):
            if number >= plan.equal_steps:
                step.weight, step.closes_update = plan.weight(number, rank), plan.closes_update(number)
                if not step.weight:  # a padding batch
                    step.count = 0
            if epoch.bounds is not None:
                update = plan.update(number)
                step.weight = step.count * plan.world_size / (epoch.bounds[update.stop] - epoch.bounds[update.start])
            step.epoch, step.taken = epoch_number, min(start + (number + 1) * plan.step_size, plan.samples)
            yield step

    @property
    def is_even(self) -> bool:
        last = self.plan.shard(self.plan.steps - 1, self.world.size - 1)
        return bool(last.stop > last.start)

    def _evaluation_steps(self) -> Iterator[Step]:
        epoch = self._begin_epoch()
        left = self.plan.steps
        filled = (shard for shard in self.plan.shards(self.world.rank) if shard.stop > shard.start)
        for step in self._load(epoch, filled):
            left -= 1
            yield step
        yield from repeat(NO_SAMPLES, left)

    def _begin_epoch(self) -> Epoch:
        """Return the next epoch, and plan for it. Collective with a sampler.

        Raises:
            ConfigError: the dataset has another length than it had, or `EpochOrder.draw_epoch` says why.
        """
        if not self._is_drawn and (length := _length(self.dataset)) != self.dataset_length:
            raise ConfigError(
                f"the dataset had {self.dataset_length} samples when its loader was made, and has {length} now; make "
                "another loader after it has changed"
            )
        epoch = self._order.draw_epoch(self.epoch, self.seed)
        self.epoch += 1
        self._plan_for(len(epoch))
        return epoch

    def _load(self, epoch: Epoch, shards: Iterable[slice]) -> Iterator[Step]:
        """Return the batches of this rank's shards of an epoch; padding batches for those that are empty."""
        if isinstance(self.dataset, InMemory):
            return self._cut(self.dataset, epoch.batches(shards, self.dataset.inputs.device))
        keys: Iterator[Any] = epoch.batches(shards)
        lists = keys if isinstance(epoch.keys, list) else map(Tensor.tolist, keys)
        self._indices.epoch = map(itemgetter(0), lists) if self._is_ready else lists
        batches = batches_of(self._data_loader, self.seed, self.epoch, self.world.rank)
        return self._counted(batches, self.world.device)

    def _cut(self, dataset: InMemory, batches: Iterable[Tensor | list[Any]]) -> Iterator[Step]:
        inputs, targets, transform = dataset.inputs, dataset.targets, dataset.transform
        for index in batches:
            if not isinstance(index, Tensor):
                raise ConfigError("InMemory has its samples by number, and the sampler has drawn something else")
            cut = inputs.index_select(0, index)
            yield Step((transform(cut) if transform else cut, targets.index_select(0, index)), len(index))

    @cached_property
    def _data_loader(self) -> DataLoader[Any]:
        """The DataLoader of all epochs, so that persistent workers persist; `_indices` says what each epoch loads."""
        batches = {"sampler": self._indices, "batch_size": None} if self._is_ready else {"batch_sampler": self._indices}
        return self._make_data_loader(self.dataset, **batches)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        return bytes, (value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),)


def digest(value: Any, seed: int | None = None) -> int:
    """Return a checksum of a value of any type that can be pickled, of tensors by their numbers alone.

    Args:
        seed: of the global random generators afterwards.
    """
    pickler = _Pickler(file := BytesIO())
    pickler.fast = True  # equal parts count alike, whether they are one object or two
    pickler.dump(value)
    if seed is not None:
        seed_globally(seed)
    return zlib.crc32(file.getbuffer())


def _checksums_of_attributes(dataset: Any, names: Sequence[str] = _ATTRIBUTES) -> dict[str, int]:
    """Return checksums of a dataset's attributes, and of those that it is made of, as a `Subset` is."""
    found: dict[str, int] = {}
    for _ in range(_DEEPEST):
        for name in names:
            if isinstance(values := getattr(dataset, name, None), Sequence | Tensor | np.ndarray):
                key = f"{name} of {type(dataset).__name__}"  # which may be one of several, a Subset of a Subset
                with suppress(Exception):  # of what cannot be pickled
                    found[key] = digest([values[:: len(values) // _MOST_CHECKED + 1], found.get(key)])
        dataset = getattr(dataset, "dataset", None)
    return found


class _Indices:
    """The sampler of a DataLoader: the indices of each batch, or the index of each item of a dataset of batches."""

    epoch: Iterator[Any]

    def __iter__(self) -> Iterator[Any]:
        return self.epoch


def _check_order(shuffle: object, sampler: object, batch_sampler: object) -> None:
    """Raise `ConfigError` if two arguments determine the order of an epoch."""
    if batch_sampler is not None and (shuffle is not None or sampler is not None):
        other = "sampler" if sampler is not None else f"shuffle={shuffle}"
        raise ConfigError(f"a batch_sampler draws the order and the batches itself; leave {other} out")
    if sampler is not None and shuffle is not None:
        raise ConfigError(f"shuffle is {shuffle}, and a sampler draws the order; give one of the two")


def _length(dataset: Any) -> int:
    try:
        if is_stream(dataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError
        return len(dataset)
    except TypeError:
        raise ConfigError(
            f"{type(dataset).__name__} cannot be sharded exactly; it takes a map-style dataset, with __len__ and "
            "__getitem__, or run.loader, which takes an iterable one"
        ) from None

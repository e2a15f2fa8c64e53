"""Sharded loader: batches for one rank, cut from tensors in memory or through torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer.data.base import Group, Loader, Step, check_one_size, check_options, is_stream
from trainer.data.moving import move
from trainer.data.order import EpochOrder
from trainer.data.shard_plan import ShardPlan, mix_seeds
from trainer.data.workers import usr2_blocked
from trainer.errors import ConfigError
from trainer.launch.marks import loading
from trainer.launch.status import report_phase
from trainer.launch.world import World

Batch = tuple[Any, Any]


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
    what one process computes with an N times larger batch, whatever the size of the dataset. In an evaluation each
    sample comes once, and a rank may get fewer batches than another.

    Args:
        dataset: `InMemory`, or any map-style dataset, such as a list.
        batch_size: samples per rank and step.
        global_batch_size: samples of all ranks and step, instead of `batch_size`.
        shuffle: a new order in every epoch, from `seed`; without it the dataset's own order. By default in training.
        training: False for an evaluation.
        sampler: draws the order of each epoch's samples, instead of `shuffle`: torch's WeightedRandomSampler, say.
        drop_last: leave out the samples that do not fill the last step of all ranks.
        weigh_by: returns what a batch counts for in the mean of an update, such as its tokens; by default its samples.
        world: the ranks that share the dataset; by default the world that this process was launched into.
        on_step: called with each training step before its batch is yielded, and after the last one.
        group: the ranks' collectives, so that all ranks take what rank 0's sampler has drawn.
        num_workers: processes per rank that load samples, for a dataset that is not in memory.
        options: further options of torch's DataLoader, such as `collate_fn` or `prefetch_factor`.

    Raises:
        ConfigError: a number is not valid, the dataset cannot be sharded, or an option is not one of DataLoader's.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shuffle: bool | None = None,
        training: bool = True,
        sampler: Sampler[int] | None = None,
        drop_last: bool = False,
        weigh_by: Callable[[Any], Tensor | float] | None = None,
        seed: int = 0,
        accumulate: int = 1,
        world: World | None = None,
        on_step: Callable[[Step], None] | None = None,
        group: Group | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        check_one_size(batch_size, global_batch_size)
        _check_options(dataset, options)
        if sampler is not None and shuffle is not None:
            raise ConfigError(f"shuffle is {shuffle}, and a sampler draws the order; give one of the two")
        super().__init__(
            world, training=training, accumulate=accumulate, weigh_by=weigh_by, on_step=on_step, group=group
        )
        self.dataset_length = _length(dataset)
        """Samples in the dataset, of which an epoch may take others."""
        shuffle = training if shuffle is None else shuffle
        self._order = EpochOrder(self.dataset_length, shuffle=shuffle, seed=seed, sampler=sampler, group=group)
        self._whole_plan = ShardPlan(
            samples=self._order.samples,
            world_size=self.world.size,
            batch_size=1 if batch_size is None else batch_size,
            global_batch_size=global_batch_size,
            accumulate=accumulate,
        )
        self._drop_last, self.seed, self.num_workers, self._options = drop_last, seed, num_workers, options
        self.plan = self._plan_from(0)
        self.dataset = dataset.to(self.world.device) if isinstance(dataset, InMemory) else dataset

    @property
    def step_size(self) -> int:
        return self.plan.step_size

    @property
    def epoch_samples(self) -> int:
        return self.plan.samples

    def samples_after(self, steps: int) -> int:
        return min(steps * self.plan.step_size, self.plan.samples)

    @property
    def must_agree(self) -> dict[str, Any]:
        """What has to be the same on all ranks."""
        return {
            "samples of the dataset": self.dataset_length,
            "samples of an epoch": self.plan.samples,
            "samples per step": self.plan.step_size,
        }

    def __len__(self) -> int:
        """Return the steps in an epoch, the same on every rank. In an evaluation a rank may have fewer."""
        return self.plan.steps

    @property
    def _timed_plan(self) -> ShardPlan:
        return self.plan

    def _holds_for(self, is_within: bool) -> dict[str, Any]:
        return {"samples": self.dataset_length, "shuffle": self._order.description, "seed": self.seed}

    def _plan_from(self, start: int) -> ShardPlan:
        plan = replace(self._whole_plan, start=start)
        return plan.full_steps() if self._drop_last else plan

    def updates_before(self, taken: int) -> int:
        """Return the updates in which an epoch of this plan takes its first `taken` samples."""
        return -(-taken // (self.plan.step_size * self.plan.accumulate))

    def _all_steps(self) -> Iterator[Step]:
        plan = self._plan_from(self.start)
        self._begin(plan.start)
        shards = [plan.shard(step, self.world.rank) for step in range(plan.steps)]
        # The padding batch is the epoch's first two samples, with weight 0. Two, because BatchNorm over vectors
        # cannot normalize a single one.
        places = [shard if shard.stop > shard.start else slice(0, 2) for shard in shards]
        epoch = self.epoch
        for number, (shard, batch) in enumerate(zip(shards, self._batches(places), strict=True)):
            weight = plan.weight(number, self.world.rank)
            taken = min(plan.start + (number + 1) * plan.step_size, plan.samples)
            yield Step(batch, shard.stop - shard.start, weight, plan.closes_update(number), epoch, taken)

    def own_samples(self) -> Iterator[Step]:
        shards = [self.plan.shard(step, self.world.rank) for step in range(self.plan.steps)]
        own = [shard for shard in shards if shard.stop > shard.start]
        for shard, batch in zip(own, self._batches(own), strict=True):
            report_phase("evaluation")
            self.on_own_step(True)
            yield Step(batch, shard.stop - shard.start, 1.0, True)
        for _ in range(len(shards) - len(own)):
            self.on_own_step(False)

    def _batches(self, places: Sequence[slice]) -> Iterator[Any]:
        order = self._order.of(self.epoch)
        self.epoch += 1
        if isinstance(self.dataset, InMemory):
            return self._cut(self.dataset, order, places)
        return self._load(order, places)

    def _cut(self, dataset: InMemory, order: Tensor, places: Sequence[slice]) -> Iterator[Batch]:
        order = order.to(dataset.inputs.device)
        inputs, targets, transform = dataset.inputs, dataset.targets, dataset.transform
        for place in places:
            index = order[place]
            cut = inputs.index_select(0, index)
            yield (transform(cut) if transform else cut), targets.index_select(0, index)

    def _load(self, order: Tensor, places: Sequence[slice]) -> Iterator[Any]:
        self._places.batches = [order[place].tolist() for place in places]
        generator = self._data_loader.generator
        generator.manual_seed(mix_seeds(self.seed, self.epoch, self.world.rank))
        with usr2_blocked():  # which starts the workers
            batches = iter(self._data_loader)
        for batch in loading(batches):
            yield move(batch, self.world.device)

    @cached_property
    def _places(self) -> _Places:
        return _Places()

    @cached_property
    def _data_loader(self) -> DataLoader[Any]:
        """One for all epochs, so that persistent workers persist."""
        options = {"pin_memory": self.world.device.type == "cuda", **self._options}
        # A generator of its own: DataLoader would draw from torch's, and change what dropout draws.
        return DataLoader(
            self.dataset,  # type: ignore[arg-type]  # a list will do as well
            batch_sampler=self._places,
            num_workers=self.num_workers,
            generator=torch.Generator(),
            **options,
        )


class _Places(Sampler[list[int]]):
    """The indices of each batch of the next epoch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _check_options(dataset: Any, options: Mapping[str, Any]) -> None:
    check_options(options, ("sampler", "drop_last", "weigh_by", "num_workers"))
    if options and isinstance(dataset, InMemory):
        name = next(iter(options))
        raise ConfigError(f"option {name!r} is for datasets that are loaded sample by sample; InMemory is not")


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

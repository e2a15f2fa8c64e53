"""Sharded loader: batches for one rank, cut from tensors in memory or through torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer.data.moving import move
from trainer.data.order import EpochOrder
from trainer.data.shard_plan import ShardPlan, mix_seeds
from trainer.errors import ConfigError
from trainer.launch.world import World, current_world
from trainer.profiling.step_timer import step_timer

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


@dataclass(slots=True)  # not frozen, which would make it three times as slow to make, and each step makes one
class Step:
    """One step of one rank."""

    batch: Any
    """What the dataset's batches are, on this rank's device: a pair of tensors, a dict, …"""
    count: int
    """Samples of this rank in this step. 0 marks a padding batch, with which this rank takes part in the all-reduce."""
    weight: float
    """Factor on the local mean loss; see `ShardPlan.weight`."""
    closes_update: bool
    """Whether the gradients are all-reduced and applied after this step."""


# What holds between epochs, for batches that come from elsewhere.
_NO_STEP = Step(None, 1, 1.0, True)


class ShardedLoader:
    """Loader of this rank's shards; iterating yields an epoch of batches on the rank's device.

    In training every rank takes the same number of steps. `Run.backward` weighs each, so that N ranks compute exactly
    what one process computes with an N times larger batch, whatever the size of the dataset. In an evaluation each
    sample comes once, and a rank may get fewer batches than another.

    Args:
        dataset: `InMemory`, or any map-style dataset.
        batch_size: samples per rank and step.
        global_batch_size: samples of all ranks and step, instead of `batch_size`.
        shuffle: a new order in every epoch, from `seed`; without it the dataset's own order. By default in training.
        training: False for an evaluation.
        sampler: draws the order of each epoch's samples, instead of `shuffle`: torch's WeightedRandomSampler, say.
        drop_last: leave out the samples that do not fill the last step of all ranks.
        share_order: returns rank 0's value on every rank, so that all ranks take what one sampler has drawn.
        world: the ranks that share the dataset; by default the world that this process was launched into.
        on_step: called with each training step before its batch is yielded, and after the last one.
        num_workers: processes per rank that load samples, for a dataset that is not in memory.
        options: further options of torch's DataLoader, such as `collate_fn` or `prefetch_factor`.

    Raises:
        ConfigError: a number is not valid, the dataset cannot be sharded, or an option is not one of DataLoader's.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shuffle: bool | None = None,
        training: bool = True,
        sampler: Sampler[int] | None = None,
        drop_last: bool = False,
        share_order: Callable[[Any], Any] = lambda order: order,
        seed: int = 0,
        accumulate: int = 1,
        world: World | None = None,
        on_step: Callable[[Step], None] | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        if (batch_size is None) == (global_batch_size is None):
            raise ConfigError("a loader takes either batch_size (per rank) or global_batch_size (of all ranks)")
        _check_options(dataset, options)
        if sampler is not None and shuffle is not None:
            raise ConfigError(f"shuffle is {shuffle}, and a sampler draws the order; give one of the two")
        self.world = world or current_world()
        self.dataset_length = _length(dataset)
        """Samples in the dataset, of which an epoch may take others."""
        shuffle = training if shuffle is None else shuffle
        self._order = EpochOrder(self.dataset_length, shuffle=shuffle, seed=seed, sampler=sampler, share=share_order)
        plan = ShardPlan(
            samples=self._order.samples,
            world_size=self.world.size,
            batch_size=1 if batch_size is None else batch_size,
            global_batch_size=global_batch_size,
            accumulate=accumulate,
        )
        self.plan = plan.full_steps() if drop_last else plan
        self.dataset = dataset.to(self.world.device) if isinstance(dataset, InMemory) else dataset
        self.epoch = 0
        """Number of the next epoch, from 0; set it to continue an interrupted run."""
        self.training, self.seed, self.num_workers = training, seed, num_workers
        self._on_step, self._options = on_step, options

    def __len__(self) -> int:
        """Return the steps in an epoch, the same on every rank. In an evaluation a rank may have fewer."""
        return self.plan.steps

    def __iter__(self) -> Iterator[Any]:
        for step in self.steps() if self.training else self.own_samples():
            yield step.batch

    def steps(self) -> Iterator[Step]:
        """Yield the steps of the next epoch, padding batches included: every rank takes part in every all-reduce."""
        timer = step_timer() if self.training else None
        return timer.epoch(self._all_steps(), self.plan) if timer else self._all_steps()

    def _all_steps(self) -> Iterator[Step]:
        shards = [self.plan.shard(step, self.world.rank) for step in range(self.plan.steps)]
        # The padding batch is the epoch's first two samples, with weight 0. Two, because BatchNorm over vectors
        # cannot normalize a single one.
        places = [shard if shard.stop > shard.start else slice(0, 2) for shard in shards]
        on_step = self._on_step
        try:
            for number, (shard, batch) in enumerate(zip(shards, self._batches(places), strict=True)):
                step = Step(
                    batch,
                    shard.stop - shard.start,
                    self.plan.weight(number, self.world.rank),
                    self.plan.closes_update(number),
                )
                if on_step is not None:
                    on_step(step)
                yield step
        finally:  # also where the loop was left early
            if on_step is not None:
                on_step(_NO_STEP)

    def own_samples(self) -> Iterator[Step]:
        """Yield the steps of the next epoch in which this rank has samples: for evaluation, without padding batches."""
        shards = [self.plan.shard(step, self.world.rank) for step in range(self.plan.steps)]
        shards = [shard for shard in shards if shard.stop > shard.start]
        for shard, batch in zip(shards, self._batches(shards), strict=True):
            yield Step(batch, shard.stop - shard.start, 1.0, True)

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
        for batch in self._data_loader:
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
            self.dataset,
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


_OPTIONS = ("collate_fn", "multiprocessing_context", "persistent_workers", "pin_memory", "prefetch_factor", "timeout",
            "worker_init_fn")  # fmt: skip


def _check_options(dataset: Dataset[Any], options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in _OPTIONS:
            raise ConfigError(f"a loader has no option {name!r}; valid are num_workers, {', '.join(_OPTIONS)}")
        if isinstance(dataset, InMemory):
            raise ConfigError(f"option {name!r} is for datasets that are loaded sample by sample; InMemory is not")


def _length(dataset: Dataset[Any]) -> int:
    try:
        if not hasattr(dataset, "__getitem__"):
            raise TypeError
        return len(dataset)  # type: ignore[arg-type]  # torch's Dataset has no __len__; map-style ones do
    except TypeError:
        raise ConfigError(
            f"{type(dataset).__name__} cannot be sharded exactly; it takes a map-style dataset, with "
            "__len__ and __getitem__"
        ) from None

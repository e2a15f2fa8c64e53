"""Sharded loader: batches for one rank, cut from tensors in memory or through torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainer.data.shard_plan import ShardPlan, mix_seeds, permutation
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

    inputs: Any
    targets: Any
    count: int
    """Samples of this rank in this step. 0 marks a padding batch, with which this rank takes part in the all-reduce."""
    weight: float
    """Factor on the local mean loss; see `ShardPlan.weight`."""
    closes_update: bool
    """Whether the gradients are all-reduced and applied after this step."""


class ShardedLoader:
    """Loader of this rank's shards; iterating yields an epoch of `(inputs, targets)` on the rank's device.

    Every rank takes the same number of steps. Multiply the local mean loss by `weight`, which belongs to the batch
    that was yielded last: N ranks then compute exactly what one process computes with an N times larger batch,
    whatever the size of the dataset.

    Args:
        dataset: `InMemory`, or any map-style dataset of (input, target) pairs.
        batch_size: samples per rank and step.
        shuffle: a new order in every epoch, from `seed`; without it the dataset's own order.
        world: the ranks that share the dataset; by default the world that this process was launched into.
        workers: processes per rank that load samples, for a dataset that is not in memory.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        accumulate: int = 1,
        world: World | None = None,
        workers: int = 0,
    ) -> None:
        self.world = world or current_world()
        self.plan = ShardPlan(
            samples=_length(dataset), world_size=self.world.size, batch_size=batch_size, accumulate=accumulate
        )
        self.dataset = dataset.to(self.world.device) if isinstance(dataset, InMemory) else dataset
        self.shuffle = shuffle
        self.seed = seed
        self.workers = workers
        self.epoch = 0
        """Number of the next epoch, from 0; set it to continue an interrupted run."""
        self.weight = 1.0
        self._order: Tensor | None = None

    def __len__(self) -> int:
        """Return the steps in an epoch, the same on every rank."""
        return self.plan.steps

    def __iter__(self) -> Iterator[Batch]:
        for step in self.steps():
            self.weight = step.weight
            yield step.inputs, step.targets

    def steps(self) -> Iterator[Step]:
        """Yield the steps of the next epoch, padding batches included: every rank takes part in every all-reduce."""
        timer = step_timer() if self.shuffle else None
        return timer.epoch(self._all_steps(), self.plan) if timer else self._all_steps()

    def _all_steps(self) -> Iterator[Step]:
        shards = [self.plan.shard(step, self.world.rank) for step in range(self.plan.steps)]
        # The padding batch is the epoch's first two samples, with weight 0. Two, because BatchNorm over vectors
        # cannot normalize a single one.
        places = [shard if shard.stop > shard.start else slice(0, 2) for shard in shards]
        for step, (shard, (inputs, targets)) in enumerate(zip(shards, self._batches(places), strict=True)):
            yield Step(
                inputs,
                targets,
                shard.stop - shard.start,
                self.plan.weight(step, self.world.rank),
                self.plan.closes_update(step),
            )

    def own_samples(self) -> Iterator[Step]:
        """Yield the steps of the next epoch in which this rank has samples: for evaluation, without padding batches."""
        shards = [self.plan.shard(step, self.world.rank) for step in range(self.plan.steps)]
        shards = [shard for shard in shards if shard.stop > shard.start]
        for shard, (inputs, targets) in zip(shards, self._batches(shards), strict=True):
            yield Step(inputs, targets, shard.stop - shard.start, 1.0, True)

    def _batches(self, places: Sequence[slice]) -> Iterator[Batch]:
        order = self._next_order()
        if isinstance(self.dataset, InMemory):
            return self._cut(self.dataset, order, places)
        return self._load(order, places)

    def _next_order(self) -> Tensor:
        samples = self.plan.samples
        order = permutation(samples, epoch=self.epoch, seed=self.seed) if self.shuffle else torch.arange(samples)
        self.epoch += 1
        return order

    def _cut(self, dataset: InMemory, order: Tensor, places: Sequence[slice]) -> Iterator[Batch]:
        order = order.to(dataset.inputs.device)
        inputs, targets, transform = dataset.inputs, dataset.targets, dataset.transform
        for place in places:
            index = order[place]
            cut = inputs.index_select(0, index)
            yield (transform(cut) if transform else cut), targets.index_select(0, index)

    def _load(self, order: Tensor, places: Sequence[slice]) -> Iterator[Batch]:
        device = self.world.device
        pinned = device.type == "cuda"
        loader = DataLoader(
            self.dataset,
            batch_sampler=[order[place].tolist() for place in places],
            num_workers=self.workers,
            # A generator of its own: DataLoader would draw from torch's, and change what dropout draws.
            generator=torch.Generator().manual_seed(mix_seeds(self.seed, self.epoch, self.world.rank)),
            pin_memory=pinned,
        )
        for batch in loader:
            inputs, targets = batch
            yield move(inputs, device), move(targets, device)


def move(value: Any, device: torch.device) -> Any:
    """Return `value` with every tensor in it (in tuples, lists and dicts) on `device`."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: move(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(item, device) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(move(item, device) for item in value)
    return value


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

"""Batches for one rank: cut from tensors in memory, or through torch's DataLoader, with the same sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainer.data.sharding import ShardPlan, mix_seeds, permutation
from trainer.errors import ConfigError
from trainer.timing import step_timer
from trainer.world import World, current_world

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
        """The same dataset with its tensors on `device`; they are moved once, not batch by batch."""
        return InMemory(self.inputs.to(device), self.targets.to(device), self.transform)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank."""

    inputs: Any
    targets: Any
    count: int
    """Samples of this rank in this step. 0: the batch holds a stand-in, so that this rank can take part."""
    weight: float
    """What the local mean loss is multiplied by; see `ShardPlan.weight`."""
    closes_update: bool
    """Whether the gradients are exchanged and applied after this step."""


class ShardedLoader:
    """This rank's batches, epoch after epoch; iterating yields `(inputs, targets)` on the rank's device.

    Every rank takes the same number of steps. Multiply the local mean loss by `weight`, which belongs to
    the batch that was yielded last: with that, N ranks compute exactly what one process would with an N times
    larger batch, whatever the size of the dataset.

    Args:
        dataset: `InMemory`, or any map-style dataset of (input, target) pairs.
        batch_size: samples per rank and step.
        shuffle: a new order in every epoch, from `seed`; without it the dataset's own order.
        world: whom to share with; by default the world that this process was launched into.
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
        """The epoch that the next iteration goes through, from 0; set it to continue an interrupted run."""
        self.weight = 1.0
        self._order: Tensor | None = None

    def __len__(self) -> int:
        """Steps in an epoch, the same on every rank."""
        return self.plan.steps

    def __iter__(self) -> Iterator[Batch]:
        for step in self.steps():
            self.weight = step.weight
            yield step.inputs, step.targets

    def steps(self) -> Iterator[Step]:
        """The steps of the next epoch, stand-ins included, so that every rank takes part in every exchange."""
        timer = step_timer() if self.shuffle else None
        return timer.epoch(self._all_steps(), self.plan) if timer else self._all_steps()

    def _all_steps(self) -> Iterator[Step]:
        pieces = [self.plan.piece(step, self.world.rank) for step in range(self.plan.steps)]
        # A rank that has run out computes on the epoch's first samples, with weight 0. Two of them, because
        # BatchNorm over vectors cannot normalise one.
        places = [piece if piece.stop > piece.start else slice(0, 2) for piece in pieces]
        for step, (piece, (inputs, targets)) in enumerate(zip(pieces, self._batches(places), strict=True)):
            yield Step(
                inputs,
                targets,
                piece.stop - piece.start,
                self.plan.weight(step, self.world.rank),
                self.plan.closes_update(step),
            )

    def own_samples(self) -> Iterator[Step]:
        """The steps of the next epoch in which this rank has samples: for evaluation, where nothing is exchanged."""
        pieces = [self.plan.piece(step, self.world.rank) for step in range(self.plan.steps)]
        pieces = [piece for piece in pieces if piece.stop > piece.start]
        for piece, (inputs, targets) in zip(pieces, self._batches(pieces), strict=True):
            yield Step(inputs, targets, piece.stop - piece.start, 1.0, True)

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
            # One of its own: torch's would be drawn from, and dropout with it, by every look at the data.
            generator=torch.Generator().manual_seed(mix_seeds(self.seed, self.epoch, self.world.rank)),
            pin_memory=pinned,
        )
        for batch in loader:
            inputs, targets = batch
            yield move(inputs, device), move(targets, device)


def move(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it (in tuples, lists and dicts) on `device`."""
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

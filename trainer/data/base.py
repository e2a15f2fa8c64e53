"""Base class of the loaders, and the steps that they yield."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.context import BaseContext
from numbers import Integral
from operator import attrgetter
from typing import Any, Protocol, TypedDict, Unpack

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainer.cluster.world import World, current_world
from trainer.data.batches import Step, collate, move, start_worker
from trainer.errors import ConfigError, TrainerError
from trainer.watch.heartbeat import report_phase
from trainer.watch.spans import loading

NOT_GIVEN: Any = object()
"""Default of `batch_size`, because None says that the dataset's items are batches already."""

NO_STEP = Step(None, 1)
"""Neutral step used outside loaders."""
NO_SAMPLES = Step(None, 0)
"""A step of an evaluation in which this rank has no samples, and others have some. A script does not get it."""


class Group(Protocol):
    """The collectives that a loader needs. `Run` has them."""

    def all_reduce(self, value: Tensor, reduction: str) -> Tensor: ...
    def all_gather(self, value: Any) -> list[Any]: ...
    def broadcast(self, value: Any) -> Any: ...
    def average_weights(self) -> None: ...


class Observer:
    """Listener to a loader, in training called after the same steps on every rank. By default nothing happens."""

    def wrap(self, loader: Loader, steps: Iterator[Step]) -> Iterator[Step]:
        """Wrap the iterator over the steps of a pass in training, to time or to end them."""
        return steps

    def begun(self, loader: Loader, *, is_resumed: bool) -> None:
        """Runs before the first batch of a pass is drawn; of the rest of a pass that was interrupted, if resumed."""

    drawn: Callable[[Loader, Step], None] | None = None
    """Runs before the batch of a training step is yielded."""
    updated: Callable[[Loader], None] | None = None
    """Runs after an update, before the next batch is drawn."""

    def ended(self, loader: Loader, *, was_left: bool) -> None:
        """Runs when a pass has ended; `was_left` after an update, by a loop that was left early."""

    def evaluated(self, loader: Loader, step: Step | None) -> None:
        """Runs before the batch of an evaluation's step is yielded; for each `NO_SAMPLES`; with None at the end."""


class DataLoaderOptions(TypedDict, total=False):
    """The options of torch's DataLoader that a loader accepts."""

    collate_fn: Callable[[list[Any]], Any] | None
    multiprocessing_context: BaseContext | str | None
    persistent_workers: bool
    pin_memory: bool
    prefetch_factor: int | None
    timeout: float
    worker_init_fn: Callable[[int], None] | None


class CommonOptions(DataLoaderOptions, total=False):
    """The options that every loader and `run.loader` take; see `Loader`."""

    weigh_by: Callable[[Any], Tensor | float] | None
    num_workers: int


class LoaderOptions(CommonOptions, total=False):
    """`CommonOptions`, and the options that `run.loader` sets from the run; see `Loader`."""

    seed: int
    accumulate: int
    world: World | None
    group: Group | None


OPTIONS = tuple(DataLoaderOptions.__annotations__)


class Loader(ABC):
    """Base of all loaders. Iterating yields an epoch of batches on the rank's device.

    Args:
        is_ready: whether the dataset's items are batches already.
        training: False for an evaluation.
        drop_last: leave out what does not fill the last step of all ranks.
        weigh_by: returns what a batch counts for in the mean of an update, such as its tokens; by default its samples.
        seed: seeds the order, and with the epoch and the rank the workers' random numbers.
        accumulate: steps whose gradients form one update.
        world: the ranks that share the dataset; by default the world that this process was launched into.
        group: the ranks' collectives; not needed on a single rank.
        num_workers: processes per rank that load samples, for a dataset that is not in memory.
        options: further options of torch's DataLoader, such as `collate_fn` or `prefetch_factor`.

    Raises:
        ConfigError: `weigh_by` is given in an evaluation, or an option is none of DataLoader's.
    """

    kind = "a loader"
    """How errors name such a loader."""
    step_size: int
    """Units that all ranks together take in one full step."""
    epoch = 0
    """Number of the next epoch, from 0; set it to continue an interrupted run."""
    start = 0
    """Units of the next epoch that an interrupted run has already taken."""
    taken = 0
    """Units of the running epoch that all ranks together have taken, including the last batch."""
    passes_done_before_resume = 0
    """Passes that an interrupted run made in this epoch; as many passes yield nothing after it is resumed."""
    number = 0
    """Number of the loader within its run, the same on every rank."""
    takes: tuple[str, ...] = ()
    """Names of the options that only loaders of this class take, for an error."""

    def __init__(
        self,
        is_ready: bool,
        /,
        *,
        training: bool = True,
        drop_last: bool = False,
        weigh_by: Callable[[Any], Tensor | float] | None = None,
        seed: int = 0,
        accumulate: int = 1,
        world: World | None = None,
        group: Group | None = None,
        num_workers: int = 0,
        **options: Unpack[DataLoaderOptions],
    ) -> None:
        for name in options:
            if name not in OPTIONS:
                valid = ", ".join((*self.takes, "drop_last", "weigh_by", "num_workers", *OPTIONS))
                raise ConfigError(f"{self.kind} has no option {name!r}; valid are {valid}")
        if weigh_by is not None and not training:
            raise ConfigError("weigh_by is for training; in an evaluation, add up what you need of each batch")
        self.world = world or current_world()
        self.training, self.drop_last, self.accumulate = training, drop_last, accumulate
        self.seed = self._given_seed = seed
        """Of orders and random numbers. It may be changed; positions refer to the seed of the constructor."""
        self.num_workers, self._options = num_workers, options
        self.unit = "batches" if is_ready else "samples"
        """What an epoch is counted in: "samples", or "batches" where these come whole and are not cut."""
        self.observers: list[Observer] = []
        """In the order in which they are told. Checkpoints come last, because they may end the process."""
        # Only the rank that has loaded a ready batch knows how many samples it has.
        self._is_ready, self._must_count = is_ready, is_ready and training and weigh_by is None
        self._weigh_by, self._group = weigh_by, group

    @property
    @abstractmethod
    def epoch_samples(self) -> int | None:
        """Units that all ranks together take in an epoch; None where they are not known."""

    @property
    @abstractmethod
    def must_agree(self) -> Mapping[str, Any]:
        """Facts that have to be the same on all ranks, by their name in an error."""

    @property
    def updates(self) -> int:
        """Optimizer updates in an epoch of `len(self)` steps; the last update may have fewer steps than the others."""
        return -(-len(self) // self.accumulate)

    @property
    def is_even(self) -> bool:
        """Whether no rank is known to have fewer evaluation batches than another."""
        return True

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def samples_after(self, steps: int) -> int:
        """Return the units that all ranks together have taken after this many steps of the epoch."""

    @abstractmethod
    def _evaluation_steps(self) -> Iterator[Step]:
        """Yield the steps of the next epoch, `NO_SAMPLES` where this rank is known to have none."""

    @abstractmethod
    def _all_steps(self) -> Iterator[Step]:
        """Yield the steps of the next epoch, padding batches included."""

    def __iter__(self) -> Iterator[Any]:
        return map(attrgetter("batch"), self.steps() if self.training else self.evaluation_steps())

    def steps(self) -> Iterator[Step]:
        """Yield the steps of the next epoch, padding batches included: every rank takes part in every all-reduce."""
        steps = self._training()
        for observer in self.observers:
            steps = observer.wrap(self, steps)
        return steps

    def state_dict(self) -> dict[str, Any]:
        """Return the position in units, so that any number of ranks can go on there, and what it depends on."""
        taken = self.taken or self.start
        depends_on = {"unit": self.unit, **self._position_depends_on(is_within=True)}
        return {"epoch": self.epoch - (self.taken > 0), "taken": taken, "own_seed": self.seed, **depends_on}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a `state_dict` in the next epoch; raise `ConfigError` if its data or order differ."""
        for name, here in {"unit": self.unit, **self._position_depends_on(state["taken"] > 0)}.items():
            if state.get(name) != here:
                raise ConfigError(
                    f"the checkpoint's position holds for {name} {state.get(name)}, and here it is {here}"
                )
        self.epoch, self.start = state["epoch"], state["taken"]
        self.seed = state["own_seed"]

    @abstractmethod
    def _position_depends_on(self, is_within: bool) -> Mapping[str, Any]:
        """Return what a position within an epoch (`is_within`), or between epochs, depends on."""

    def _begin(self, start: int) -> None:
        """Begin a pass after `start` units, and tell the observers. Called before the first batch is drawn."""
        self.start, self.taken = 0, start
        for observer in self.observers:
            observer.begun(self, is_resumed=start > 0)

    def _make_data_loader(self, dataset: Any, **given: Any) -> DataLoader[Any]:
        """Return torch's DataLoader with this loader's options; `given` says which batches it makes, and goes first."""
        options: dict[str, Any] = {"pin_memory": self.world.device.type == "cuda", **self._options}
        options["collate_fn"] = partial(collate, function=options.get("collate_fn"), is_ready=self._is_ready)
        options["worker_init_fn"] = partial(start_worker, function=options.get("worker_init_fn"))
        # Without this generator, DataLoader would draw from torch's, and change what dropout draws.
        options |= {"num_workers": self.num_workers, "generator": torch.Generator()}
        return DataLoader(dataset, **options | given)

    def _counted(self, steps: Iterator[Step], device: torch.device | None = None) -> Iterator[Step]:
        """Yield the loaded batches with their numbers of samples, and moved to a device if it is given."""
        for step in steps:
            if step.count < 0 and self._must_count:
                raise TrainerError(
                    f"no tensor in a batch of type {type(step.batch).__name__} tells how many samples it has; say what "
                    "a batch counts for with weigh_by"
                )
            step.count = abs(step.count)
            if device is not None:
                step.batch = move(step.batch, device)
            yield step

    def _training(self) -> Iterator[Step]:
        if self.passes_done_before_resume:
            self.passes_done_before_resume -= 1
            return
        # An observer that comes within a pass follows from the next one on.
        observers, was_left = (*self.observers,), False
        drawn = [each.drawn for each in observers if each.drawn is not None]
        updated = [each.updated for each in observers if each.updated is not None]
        try:
            is_known = self._weigh_by is None and not self._must_count
            for step in loading(self._all_steps() if is_known else self._weighed_steps(), "training"):
                for tell in drawn:
                    tell(self, step)
                self.taken, was_left = step.taken, step.closes_update
                yield step
                was_left = False
                for told in updated if step.closes_update else ():
                    told(self)
            if self._group is not None:
                self._group.average_weights()
        finally:  # also where the loop was left early
            self.taken = 0
            for observer in observers:
                observer.ended(self, was_left=was_left)
            report_phase("between epochs")

    def evaluation_steps(self) -> Iterator[Step]:
        """Yield the steps of the next epoch in which this rank has samples: for evaluation, without padding batches."""
        observers = (*self.observers,)
        try:
            for step in loading(self._evaluation_steps(), "evaluation"):
                for observer in observers:
                    observer.evaluated(self, step)
                if step is not NO_SAMPLES:
                    yield step
        finally:  # also where the loop was left early
            for observer in observers:
                observer.evaluated(self, None)

    def _weighed_steps(self) -> Iterator[Step]:
        """Yield the steps of the next epoch, weighed by `weigh_by` or by samples. Collective, once per update."""
        update: list[Step] = []
        for step in self._all_steps():
            update.append(step)
            if not step.closes_update:
                continue
            counts = [self._weight_of(step) if step.count else 0.0 for step in update]
            total = torch.tensor(sum(counts), dtype=torch.float64)
            if self._group is not None:
                total = self._group.all_reduce(total, "sum")
            whole = float(total) or 1.0
            for count in counts:
                weighed = update.pop(0)
                weighed.weight = count * self.world.size / whole
                yield weighed

    def _weight_of(self, step: Step) -> float:
        """Return a batch's weight in the mean of its update, before it is divided by the sum of the weights."""
        if self._weigh_by is None:
            return float(step.count)
        weight = self._weigh_by(step.batch)
        try:
            count = float(weight)
        except (TypeError, ValueError, RuntimeError):
            count = math.nan
        if not 0 <= count < math.inf:
            raise TrainerError(f"weigh_by has returned {weight!r} for a batch; it takes a number that is at least 0")
        return count


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset can only be iterated over: as torch's `IterableDataset`, or without a `__getitem__`.

    A stream of Hugging Face has a `__getitem__` that takes a column's name; without a length it is a stream.
    Raises `ConfigError` for a DataLoader, whose batches would be taken for samples.
    """
    if isinstance(dataset, DataLoader):
        raise ConfigError("a loader takes a dataset; run.prepare takes a DataLoader")
    if isinstance(dataset, IterableDataset):
        return True
    is_indexed = getattr(type(dataset), "__getitem__", None) not in (None, Dataset.__getitem__)  # the latter raises
    return hasattr(dataset, "__iter__") and not (is_indexed and hasattr(dataset, "__len__"))


def check_sizes(
    batch_size: int | None, global_batch_size: int | None, batch_sampler: object = None, *, drop_last: bool
) -> bool:
    """Return whether the dataset's items are batches already, which `batch_size=None` alone says.

    Raises:
        ConfigError: several of the three are given, or none; a size is no integer; or drop_last where batches are not
            cut.
    """
    sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size, "batch_sampler": batch_sampler}
    given = [name for name, value in sizes.items() if value is not None and value is not NOT_GIVEN]
    if len(given) > 1 or (not given and batch_size is NOT_GIVEN):
        raise ConfigError(
            "a loader takes either batch_size (per rank) or global_batch_size (of all ranks); or batch_sampler, or "
            f"batch_size=None for a dataset whose items are batches; {' and '.join(given) or 'none of them'} is given"
        )
    for name in {"batch_size", "global_batch_size"} & set(given):
        if not isinstance(sizes[name], Integral):
            raise ConfigError(f"{name} is {sizes[name]!r}; it must be an integer of at least 1")
    if drop_last and not {"batch_size", "global_batch_size"} & set(given):
        raise ConfigError(
            "drop_last is for batches that the loader cuts; with batch_sampler or batch_size=None, none is"
        )
    return not given

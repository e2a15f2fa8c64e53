"""The order of an epoch's samples or batches, which is the same on every rank.

What a sampler draws depends only on the seed and the epoch, never on what was drawn before. So an epoch that was
interrupted can be drawn again. The sampler of a script's own DataLoader goes on with its generators instead, whose
states at the beginning of an epoch are kept.
"""

from __future__ import annotations

import operator
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from trainer.data.base import Group
from trainer.data.permutation import Permutation
from trainer.data.shard_plan import mix_seeds, permutation
from trainer.errors import ConfigError

Drawn = Sampler[int] | Iterable[int]
DrawnBatches = Sampler[list[int]] | Iterable[Iterable[Any]]

_LARGEST_TABLE = 2**20
"""Up to so many samples an epoch's shuffled order is a table, of 8 MB; beyond, it is computed when it is needed."""
_MOST_DRAWN = 2**27
"""Of more samples with replacement, no table is drawn; they are computed when they are needed, each equally often."""
_AT_ONCE = 8
"""Batches whose order is computed at once, because each call costs 70 µs, and an index 0.1 µs."""


@dataclass(frozen=True)
class Epoch:
    """The dataset's indices in the order of an epoch. Ranks divide it in units, which are items or whole batches."""

    keys: Tensor | list[Any] | Permutation
    """The indices, or other keys, by which the dataset is asked for its items."""
    bounds: Sequence[int] | None = None
    """Positions in `keys` where each batch begins, and where the last batch ends; None if each item is a unit."""

    def __len__(self) -> int:
        """Return the number of units."""
        return len(self.keys) if self.bounds is None else len(self.bounds) - 1

    def key_range(self, units: slice) -> slice:
        """Return the slice of `keys` that a slice of units covers; for an empty slice, that of a padding batch.

        A padding batch repeats the first two samples of the epoch: two, because BatchNorm over vectors cannot normalize
        a single sample. If batches come whole it is the first batch, because a loss may need a whole batch.
        """
        if units.stop == units.start:
            return slice(0, min(2, len(self.keys)) if self.bounds is None else self.bounds[1])
        return units if self.bounds is None else slice(self.bounds[units.start], self.bounds[units.stop])

    def batches(self, shards: Iterable[slice], device: torch.device | None = None) -> Iterator[Tensor | list[Any]]:
        """Yield the keys of each slice of units; if they are a tensor, on this device."""
        if not isinstance(self.keys, Permutation):
            keys = self.keys.to(device) if isinstance(self.keys, Tensor) else self.keys
            for part in shards:
                yield keys[part if self.bounds is None and part.stop > part.start else self.key_range(part)]
            return
        ranges = map(self.key_range, shards)
        while block := list(islice(ranges, _AT_ONCE)):
            numbers = np.concatenate([np.arange(part.start, part.stop, dtype=np.uint64) for part in block])
            indices = torch.from_numpy(self.keys.at(numbers).view(np.int64)).to(device)
            yield from indices.split([part.stop - part.start for part in block])


class EpochOrder:
    """The order of each epoch: shuffled, that of the dataset, or drawn by a sampler or a batch sampler.

    Args:
        dataset_length: items in the dataset.
        sampler: draws each epoch's items, as many as its length.
        batch_sampler: draws each epoch's batches. It may draw more or fewer than its length, which only serves as an
            estimate until it has drawn.
        group: the ranks' collectives. If they are given, all ranks use what rank 0's sampler has drawn.

    Raises:
        ConfigError: the sampler has no length, is a BatchSampler given as `sampler`, draws no batches, or
            divides the samples among ranks itself.
    """

    def __init__(
        self,
        dataset_length: int,
        *,
        shuffle: bool,
        sampler: Drawn | None,
        batch_sampler: DrawnBatches | None,
        group: Group | None,
    ) -> None:
        self.units = dataset_length
        """Items or batches in an epoch, before any are left out."""
        self._is_table = dataset_length <= _LARGEST_TABLE
        # A position depends on this: the order of a table and the computed order differ.
        self.description: Any = shuffle if self._is_table else shuffle and "computed"
        self.drawn: list[int] | None = None
        """Number of the epoch that was drawn last, and a checksum of what was drawn; None without a sampler."""
        self._dataset_length, self._shuffle = dataset_length, shuffle
        self._sampler, self._batch_sampler, self._group = sampler, batch_sampler, group
        self._expected: list[int] | None = None
        if sampler is not None:
            self.units, self.description = _length_of(sampler), _name(sampler)
            if issubclass(type(sampler), BatchSampler):
                raise ConfigError("a sampler draws samples; leave BatchSampler out, or give it as batch_sampler")
        elif batch_sampler is not None:
            length = _length_of(batch_sampler)
            self.units = group.broadcast(length) if group is not None else length
            self.description = f"batches of {_name(batch_sampler)}"
            if self.units == 0:
                raise ConfigError(f"the batch sampler, {type(batch_sampler).__name__}, has no batches")

    @property
    def own(self) -> OwnOrder | None:
        """The order of a script's own DataLoader, if it has generators."""
        drawn_by = self._sampler or self._batch_sampler
        return drawn_by if isinstance(drawn_by, OwnOrder) else None

    def expect(self, drawn: list[int] | None) -> None:
        """Compare the next draw with that of an interrupted run, given as its `drawn`."""
        self.drawn = self._expected = drawn

    def draw_epoch(self, epoch: int, seed: int) -> Epoch:
        """Return the order of an epoch, whose number begins at 0. Collective if there is a sampler.

        Raises:
            ConfigError: the sampler has drawn another number of samples than its length, something that is not a batch,
                or something else than in the interrupted run.
        """
        if self._batch_sampler is not None:
            batches = self._draw(self._batch_sampler, epoch, seed, _batch)
            if not batches:
                raise ConfigError(f"{type(self._batch_sampler).__name__} has drawn no batch for epoch {epoch} (from 0)")
            keys = [key for batch in batches for key in batch]
            return Epoch(_compact(keys), [0, *accumulate(map(len, batches))])
        sampler: Any = self._sampler
        if type(sampler) is RandomSampler and sampler.replacement and self.units > _MOST_DRAWN:
            return Epoch(Permutation(self.units, mix_seeds(seed, epoch), len(sampler.data_source)))
        if self._sampler is not None:
            keys = self._draw(self._sampler, epoch, seed, _key)
            if len(keys) != self.units:
                raise ConfigError(f"the sampler has drawn {len(keys)} samples, and its length is {self.units}")
            return Epoch(_compact(keys))
        if self._shuffle and self._is_table:
            return Epoch(permutation(self._dataset_length, epoch=epoch, seed=seed))
        return Epoch(Permutation(self._dataset_length, mix_seeds(seed, epoch) if self._shuffle else None))

    def _draw(self, sampler: Iterable[Any], epoch: int, seed: int, convert: Callable[[Any], Any]) -> list[Any]:
        drawn = [convert(item) for item in draw(sampler, epoch=epoch, seed=seed)]
        if self._group is not None:
            drawn = self._group.broadcast(drawn)
        self.drawn, expected, self._expected = [epoch, zlib.crc32(repr(drawn).encode())], self._expected, None
        if expected is not None and expected[0] == epoch and expected != self.drawn:
            raise ConfigError(
                f"{_name(sampler)} has drawn something else for epoch {epoch} (from 0) than in the run that is "
                "to go on; what it draws may depend only on set_epoch and the random generators it holds"
            )
        return drawn


def _key(index: Any) -> Any:
    """Return an index as a Python int, and any other key of a dataset as it is."""
    try:
        return operator.index(index)
    except TypeError:
        return index


def _batch(drawn: Any) -> list[Any]:
    keys = [_key(index) for index in drawn] if hasattr(drawn, "__iter__") and not isinstance(drawn, str) else []
    if not keys:
        raise ConfigError(f"the batch sampler has drawn {drawn!r}; a batch is a list of at least one index")
    return keys


def _compact(keys: list[Any]) -> Tensor | list[Any]:
    return torch.tensor(keys, dtype=torch.int64) if all(type(key) is int for key in keys) else keys


def _length_of(sampler: Any) -> int:
    for inner in samplers_in(sampler):
        held = {name.strip("_"): value for name, value in _held_by(inner).items()}
        if any(held.get(name) not in (None, 1) for name in ("num_replicas", "world_size", "num_shards")):
            raise ConfigError(
                f"a loader divides what is drawn among the ranks itself; leave {type(inner).__name__} out, or give it "
                "num_replicas=1, rank=0"
            )
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        raise ConfigError(f"{type(sampler).__name__} has no __len__, so ranks cannot plan their steps") from None


def draw(sampler: Any, *, epoch: int, seed: int) -> list[Any]:
    """Return what a sampler, or a batch sampler, draws in an epoch.

    Raises `ConfigError` if it does not end.

    `seed` and `epoch` determine all its random numbers: the generators that it or a sampler within it holds are seeded,
    unless it is an `OwnOrder`, and so are the global generators of Python, NumPy and PyTorch, whose states are restored
    afterwards. `set_epoch` is called on each of these samplers that has it.
    """
    mixed = mix_seeds(seed, epoch)
    with seeded(mixed):
        for number, inner in enumerate(samplers_in(sampler)):
            if callable(getattr(inner, "set_epoch", None)):
                inner.set_epoch(epoch)
            for held in _held_by(inner).values() if not isinstance(sampler, OwnOrder) else ():
                _seed(held, (mixed + number) % 2**63)
        drawn = list(islice(sampler, most := 10 * len(sampler) + 1000))
    if len(drawn) == most:
        raise ConfigError(f"{type(sampler).__name__} has a length of {len(sampler)}, and no end after {most} draws")
    return drawn


class OwnOrder:
    """What a DataLoader draws with generators of its own: they go on from epoch to epoch, as in a single process.

    Args:
        sampler: the DataLoader's sampler or batch sampler.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Any) -> None:
        self.sampler, self._generator, self._persists = sampler, loader.generator, loader.persistent_workers
        self._generators = generators_of(loader)
        self._has_begun = False
        self._at_start: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self._at_start = self.state(is_within=False)
        if self._generator is not None and not (self._has_begun and self._persists):
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)  # DataLoader seeds its workers by it
        self._has_begun = True
        return iter(self.sampler)

    def state(self, *, is_within: bool) -> dict[str, Any]:
        """Return the generators' states, or if `is_within` an epoch those at its beginning."""
        if is_within and self._at_start is not None:
            return self._at_start
        return {"has_begun": self._has_begun, "states": [generator.get_state() for generator in self._generators]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with a `state`."""
        self._has_begun = state["has_begun"]
        for generator, value in zip(self._generators, state["states"], strict=True):
            generator.set_state(value)


def _name(sampler: Any) -> str:
    return type(sampler.sampler if isinstance(sampler, OwnOrder) else sampler).__name__


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators of PyTorch by which a DataLoader draws its order, always in the same order."""
    samplers = samplers_in(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    held = [value for sampler in samplers for value in _held_by(sampler).values()]
    return list(dict.fromkeys(value for value in (*held, loader.generator) if isinstance(value, torch.Generator)))


def samplers_in(sampler: Any) -> list[Any]:
    """Return a sampler and the samplers that it draws from, at any depth."""
    samplers: list[Any] = []
    waiting = [sampler]
    while waiting:
        following = waiting.pop(0)
        if not any(following is other for other in samplers):
            samplers.append(following)
            held = _held_by(following)
            waiting += [value for name, value in held.items() if name in _ATTRIBUTES or isinstance(value, Sampler)]
    return samplers


_ATTRIBUTES = ("sampler", "batch_sampler")
"""Attributes in which a sampler holds another, which need not be a `Sampler`."""


def _held_by(sampler: Any) -> dict[str, Any]:
    return getattr(sampler, "__dict__", {})


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, random.Random | np.random.RandomState):
        generator.seed(seed % 2**32)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global CPU generators of Python, NumPy and PyTorch within a context; restore their states afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            seed_globally(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def seed_globally(seed: int) -> None:
    """Seed the global CPU generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # and not those of GPUs, whose states `seeded` does not restore

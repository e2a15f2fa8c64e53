"""Batches of any kind, as torch's DataLoader makes them: counting, pinning and moving them; starting its workers."""

from __future__ import annotations

import copy
import os
import signal
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, default_collate, default_convert

from trainer.data.shard_plan import mix_seeds
from trainer.watch.heartbeat import loading


@dataclass(slots=True)
class Counted:
    """A batch and its samples; None where nothing in a ready batch tells them."""

    count: int | None
    batch: Any

    def pin_memory(self) -> Counted:
        """Pin the batch, as DataLoader asks. Its own pinning fails at classes that it cannot make anew."""
        return Counted(self.count, pin(self.batch))


def collate(samples: Any, function: Callable[[Any], Any] | None, *, is_ready: bool) -> Counted:
    """Collate samples, or convert a ready batch, and count them, which a batch of any kind does not tell.

    Args:
        function: the user's `collate_fn`; None for torch's.
    """
    batch = (function or (default_convert if is_ready else default_collate))(samples)
    return Counted(count_samples(batch) if is_ready else len(samples), batch)


def start_worker(number: int, *, function: Callable[[int], object] | None) -> None:
    """Begin a loader's worker in a process group of its own.

    torchrun, and others, send SIGTERM to the group of each rank, which takes it as a notice: without its workers it
    would fail before it has saved. A rank ends its own workers, and one whose rank has gone ends within seconds
    (PyTorch).

    Args:
        function: the user's `worker_init_fn`.
    """
    with suppress(OSError):
        os.setpgid(0, 0)
    if function is not None:
        function(number)


def batches_of(data_loader: DataLoader[Any], *seeds: int) -> Iterator[Counted]:
    """Return the batches of an epoch, whose workers draw random numbers from the seeds. Starts the workers."""
    data_loader.generator.manual_seed(mix_seeds(*seeds))
    with usr2_blocked():
        batches = iter(data_loader)
    return loading(batches)


@contextmanager
def usr2_blocked() -> Iterator[None]:
    """Give a context in which this thread starts processes that SIGUSR2 does not reach, however they are started.

    Slurm sends it to all processes of a rank, and the rank would fail without its workers before it has saved. A
    process that is forked could ignore it from its first line on. One that is spawned begins with the default action,
    which ends it, but with the blocked signals of the thread that has started it. This process gets a signal that
    comes meanwhile afterwards.
    """
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def move(value: Any, device: torch.device) -> Any:
    """Return `value` with every tensor in it on `device`.

    Tensors, packed sequences and objects with a `.to` of their own are moved by it. Mappings, tuples, lists and other
    sequences that can be changed, and dataclasses are gone through, at any depth; where something in one has moved, a
    copy of the same type takes its place. What comes twice, comes twice in the result. Everything else stays as it
    is, and so does what cannot be copied.
    """

    def moved(part: Any) -> Any:
        if isinstance(part, Tensor | PackedSequence):  # a packed sequence's batch_sizes stay on the CPU
            return part.to(device, non_blocking=True)  # type: ignore[arg-type]  # PackedSequence's types know no device
        return part.to(device) if _has(part, "to") else None

    return _Change(moved).of(value)


def pin(value: Any) -> Any:
    """Return `value` with every tensor in it in pinned memory, gone through as by `move`."""

    def pinned(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.pin_memory() if part.device.type == "cpu" and part.layout is torch.strided else part
        return part.pin_memory() if _has(part, "pin_memory") else None

    return _Change(pinned).of(value)


def count_samples(value: Any) -> int | None:
    """Return the length of the first dimension of the first tensor in a batch that has one; None without any.

    A packed sequence has as many samples as sequences.
    """
    counts: list[int] = []

    def look(part: Any) -> Any:
        if isinstance(part, PackedSequence):
            counts.append(int(part.batch_sizes[0]))
            return part
        if isinstance(part, Tensor) and part.dim():
            counts.append(part.size(0))
        return part if counts else None

    _Change(look).of(value)
    return counts[0] if counts else None


class _Change:
    """Copies a value with something else in the place of some of its parts.

    Args:
        part: returns what takes a part's place; None to go through it.
    """

    def __init__(self, part: Callable[[Any], Any]) -> None:
        self._part = part
        # By identity, which only an object that is kept keeps for itself.
        self._seen: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        if id(value) not in self._seen:
            self._seen[id(value)] = (value, value)  # what holds itself ends here
            changed = self._part(value)
            self._seen[id(value)] = (value, self._within(value) if changed is None else changed)
        return self._seen[id(value)][1]

    def _within(self, value: Any) -> Any:
        if not _is_container(value):
            return value
        parts = _parts(value)
        changed = {key: new for key, part in parts.items() if (new := self.of(part)) is not part}
        if not changed:
            return value
        try:
            return self._copy(value, parts | changed, changed)
        except Exception:  # classes of users copy themselves, or do not, in ways of their own
            return value

    def _copy(self, value: Any, parts: dict[Any, Any], changed: dict[Any, Any]) -> Any:
        if isinstance(value, tuple):
            new = _tuple(type(value), parts.values())
            _vars_of(new).update(_vars_of(value))
        elif isinstance(value, MappingProxyType):
            new = MappingProxyType(parts)
        else:
            new = copy.copy(value)
            for key, part in changed.items():
                _put(new, key, part)
        if _vars_of(value) is value:  # a dict whose attributes are its items
            new.__dict__ = new
        for name, part in [*_vars_of(new).items()]:  # what is an item may be an attribute as well
            _vars_of(new)[name] = self._seen.get(id(part), (part, part))[1]
        return new


def _is_container(value: Any) -> bool:
    if isinstance(value, type | bytearray | array):
        return False
    return isinstance(value, Mapping | tuple | MutableSequence) or is_dataclass(value)


def _parts(value: Any) -> dict[Any, Any]:
    """Return what a container is made of: its items, or the attributes in which it keeps them."""
    if isinstance(value, dict | MappingProxyType):
        return dict(value)
    if isinstance(value, tuple | list | deque):
        return dict(enumerate(value))
    names = [field.name for field in fields(value)] if is_dataclass(value) else []
    return {name: getattr(value, name) for name in names if hasattr(value, name)} | _vars_of(value)


def _put(value: Any, key: Any, part: Any) -> None:
    """Set a part past what the class itself would do with it: refuse to be changed, or convert it."""
    kind: Any = next((kind for kind in (dict, list, deque) if isinstance(value, kind)), None)
    (kind.__setitem__ if kind else object.__setattr__)(value, key, part)


def _tuple(kind: type[Any], parts: Iterable[Any]) -> Any:
    try:
        return tuple.__new__(kind, parts)  # past a `__new__` of its own, which may take something else
    except TypeError:  # of torch.return_types, say
        return kind(parts)


def _vars_of(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def _has(value: Any, method: str) -> bool:
    """Return whether an object has a method; what a container holds under that name is none."""
    if isinstance(value, type):
        return False
    return callable(getattr(type(value) if _is_container(value) else value, method, None))

"""Count, pin and move batches of any type from torch's DataLoader, and start its workers."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, default_collate, default_convert

from trainer.data.shard_plan import mix_seeds


@dataclass(slots=True)  # not frozen, which would make it three times as slow to make, and each step makes a Step
class Step:
    """A rank's batch in a step, and its weight."""

    batch: Any
    """The batch on this rank's device: a pair of tensors, a dict, …"""
    count: int
    """Samples of this rank in this step. 0 marks a padding batch, with which this rank takes part in the all-reduce.
    -1 while nothing in a ready batch has told it."""
    weight: float = 1.0
    """Factor on the local mean loss; see `ShardPlan.weight`."""
    closes_update: bool = True
    """Whether the gradients are all-reduced and applied after this step."""
    epoch: int = 0
    """Number of the epoch, from 0."""
    taken: int = 0
    """Units of this epoch that all ranks together have taken, those of this step included; see `Loader.unit`."""

    def pin_memory(self) -> Step:
        """Pin the batch; DataLoader calls this. The pinning of DataLoader fails for classes that it cannot rebuild."""
        self.batch = pin(self.batch)
        return self


def collate(samples: Any, function: Callable[[Any], Any] | None, *, is_ready: bool) -> Step:
    """Collate samples, or convert a ready batch, and count them, which a batch of any kind does not tell.

    Args:
        function: the user's `collate_fn`; None for torch's.
    """
    batch = (function or (default_convert if is_ready else default_collate))(samples)
    return Step(batch, count_samples(batch) if is_ready else len(samples))


def start_worker(number: int, *, function: Callable[[int], object] | None) -> None:
    """Put a loader's worker into a new process group.

    torchrun, and others, send SIGTERM to the group of each rank, which takes it as a notice: without its workers it
    would fail before it has saved. A rank ends its workers, and a worker whose rank has gone ends within
    seconds (PyTorch).

    Args:
        function: the user's `worker_init_fn`.
    """
    with suppress(OSError):
        os.setpgid(0, 0)
    if function is not None:
        function(number)


def batches_of(data_loader: DataLoader[Any], *seeds: int) -> Iterator[Step]:
    """Return the batches of an epoch, whose workers draw random numbers from the seeds. Starts the workers."""
    data_loader.generator.manual_seed(mix_seeds(*seeds))
    with usr2_blocked():
        return iter(data_loader)


@contextmanager
def usr2_blocked() -> Iterator[None]:
    """Block SIGUSR2 within the context, so that processes which this thread starts do not get it.

    Slurm sends it to all processes of a rank, and the rank would fail without its workers before it has saved. A
    process that is forked could ignore it from its first line on. A spawned process begins with the
    default action, which would end it, but it inherits the blocked signals of the thread that started it. This process
    gets a signal that comes meanwhile afterwards.
    """
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def move(value: Any, device: torch.device) -> Any:
    """Return `value` with every tensor in it on `device`.

    Tensors, and other objects with a method `to`, are moved by it. Lists, tuples, named tuples, dicts and other
    mappings that can be changed, and dataclasses are searched, at any depth; if something in a container has
    moved, the result has a copy of the container. Everything else stays as it is.
    """
    if type(value) in (tuple, list) and all(isinstance(part, Tensor) and part.device == device for part in value):
        return value  # by far the most common batch on a CPU, in a tenth of the time of a search

    def moved(part: Any) -> Any:
        if isinstance(part, Tensor | PackedSequence):  # a packed sequence's batch_sizes stay on the CPU
            is_async = device.type != "cpu"  # to the CPU, a value could be read before it is there
            return part.to(device, non_blocking=is_async)  # type: ignore[arg-type]  # its types know no device
        return part.to(device) if _has(part, "to") else None

    return _replace(value, moved)


def pin(value: Any) -> Any:
    """Return `value` with every tensor in it in pinned memory; searches containers like `move`."""

    def pinned(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.pin_memory() if part.device.type == "cpu" and part.layout is torch.strided else part
        return part.pin_memory() if _has(part, "pin_memory") else None

    return _replace(value, pinned)


def count_samples(value: Any) -> int:
    """Return the length of the first dimension of the first tensor in a batch; -1 without any tensor.

    A packed sequence has as many samples as sequences.
    """
    counts: list[int] = []

    def look(part: Any) -> Any:
        if isinstance(part, PackedSequence):
            counts.append(int(part.batch_sizes[0]))
        elif isinstance(part, Tensor) and part.dim():
            counts.append(part.size(0))
        return part if counts else None

    _replace(value, look)
    return counts[0] if counts else -1


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a batch or in inputs, in their order; mappings, lists and dataclasses are searched."""
    if type(value) in (tuple, list) and all(isinstance(part, Tensor) for part in value):
        return [*value]  # nearly always, and in a third of the time of a search
    tensors: list[Tensor] = []
    waiting: list[Any] = [value]
    seen: dict[int, Any] = {}  # with the containers, so that none is freed and another gets its id
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tensor):
            tensors.append(part)
        elif id(part) not in seen:  # an input may be any object, and refer to itself
            seen[id(part)] = part
            if isinstance(part, list | tuple):
                waiting.extend(reversed(part))
            elif isinstance(part, Mapping):
                waiting.extend(reversed([*part.values()]))
            elif is_dataclass(part):
                waiting.extend(getattr(part, each.name, None) for each in reversed(fields(part)))
    return tensors


def _replace(value: Any, new_of: Callable[[Any], Any]) -> Any:
    """Return a value with some of its parts replaced; the value itself if nothing changes.

    Args:
        new_of: returns the replacement of a part; None to search the part.
    """
    new = new_of(value)
    if new is not None:
        return new
    parts: dict[Any, Any] = {}
    if isinstance(value, list | tuple):
        parts = dict(enumerate(value))
    elif isinstance(value, MutableMapping):
        parts = dict(value)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
    changed = {key: new for key, part in parts.items() if (new := _replace(part, new_of)) is not part}
    if not changed:
        return value
    if isinstance(value, tuple):
        every = (parts | changed).values()
        return type(value)(*every) if hasattr(value, "_fields") else type(value)(every)
    new = copy.copy(value)
    for key, part in changed.items():
        if is_dataclass(value):
            object.__setattr__(new, key, part)  # also where it is frozen
        else:
            new[key] = part
    return new


def _has(value: Any, method: str) -> bool:
    """Return whether an object has a method; a named tuple's field of that name is no method."""
    return callable(getattr(type(value), method, None))

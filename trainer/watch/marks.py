"""Marks: what this rank does now, kept where the watcher of its host can read it while the rank itself cannot answer.

The record is a file in memory (memfd), which leaves nothing on a disk, and which the watcher opens through /proc. Its
size is fixed. Only the thread that has made it writes to it, but for `progress` and `note_recorded`. Without a record,
every function here does nothing.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from trainer.watch.mark_layout import (
    AT_COUNTS,
    AT_EVENTS,
    AT_FOLDER,
    AT_PHASE,
    AT_PROGRESS,
    AT_RECORDED,
    AT_STATE,
    COUNTS,
    HEAD,
    MAGIC,
    PHASE_BYTES,
    PROGRESS,
    RECORDED,
    SIZE,
    STATE,
    Recorded,
    State,
)

_MOST_STEPS = 64
"""More than a rank's program is ahead of its device."""


class _Record:
    def __init__(self, rank: int) -> None:
        self.descriptor = os.memfd_create("trainer-marks")
        os.posix_fallocate(self.descriptor, 0, SIZE)  # a page without memory would end this process with SIGBUS
        self._file = mmap.mmap(self.descriptor, SIZE)
        self.thread = threading.get_ident()
        self.state, self.what, self.elements, self.last, self.last_elements = int(State.BETWEEN), b"", 0, b"", 0
        self.collectives = self.events = self.steps = self.updates = self.pieces = self.failures = 0
        self.stepped_at: deque[int] = deque(maxlen=_MOST_STEPS)
        HEAD.pack_into(self._file, 0, MAGIC, os.getpid(), rank, self.thread)

    def set(self, state: int, what: bytes, elements: int, *, is_counted: bool = False) -> None:
        self.state, self.what, self.elements, self.is_counted = state, what, elements, is_counted
        self.events += 1
        # In one call: whoever reads in between must not see the last collective of one moment, and the next of another.
        now, last = (self.events, elements, what, is_counted), (self.last_elements, self.last, self.failures)
        STATE.pack_into(self._file, AT_STATE, state, self.collectives, *now, *last)

    def count(self) -> None:
        COUNTS.pack_into(self._file, AT_COUNTS, self.steps, self.updates)

    def fail(self, what: bytes, elements: int = 0, *, is_counted: bool = False) -> None:
        self.failures += 1
        self.set(State.FAILED, what, elements, is_counted=is_counted)

    def phase(self, phase: str) -> None:
        self.events += 1
        struct.pack_into("<q", self._file, AT_EVENTS, self.events)
        struct.pack_into(f"{PHASE_BYTES}s", self._file, AT_PHASE, phase.encode())

    def progress(self) -> None:
        self.pieces += 1
        PROGRESS.pack_into(self._file, AT_PROGRESS, self.pieces)

    def folder(self, folder: str) -> None:
        room = AT_RECORDED - AT_FOLDER
        struct.pack_into(f"{room}s", self._file, AT_FOLDER, folder.encode())

    def recorded(self, found: Recorded) -> None:
        counts = (found.read_at, found.enqueued, found.completed, found.number, found.elements, found.steps)
        # In one piece: `pack_into` writes zeros first, which a watcher would take for progress.
        self._file[AT_RECORDED:] = RECORDED.pack(*counts, found.what.encode(), found.group.encode())


_record: _Record | None = None


def open_record(rank: int) -> int | None:
    """Make the record of this process; return its descriptor, or None where there is one already.

    Raises:
        OSError: the system has no such files.
    """
    global _record
    if _record is not None:
        return None
    _record = _Record(rank)
    return _record.descriptor


def close_record() -> None:
    """Write no further marks."""
    global _record
    if _record is not None:
        with suppress(OSError):
            os.close(_record.descriptor)
        _record = None


def _forget() -> None:
    # A child, such as a loader's worker, shares the memory.
    global _record
    _record = None


os.register_at_fork(after_in_child=_forget)


def _own() -> _Record | None:
    return _record if _record is not None and _record.thread == threading.get_ident() else None


class waits:  # noqa: N801 (a context, as contextlib's are)
    """Context in which this rank waits for others. One within another is a part of it.

    Args:
        what: is waited for.
        elements: of the tensor; 0 where the ranks' may differ.
        counts: whether it is one of the collectives that are counted, in which all ranks take part.
    """

    def __init__(self, what: str, elements: int = 0, *, counts: bool = False) -> None:
        self._what, self._elements, self._counts = what.encode(), elements, counts
        self._record: _Record | None = None

    def __enter__(self) -> None:
        record = _own()
        if record is not None and record.state == State.WAITING:
            # Which tells that a part of it has begun.
            record.set(record.state, record.what, record.elements, is_counted=record.is_counted)
        elif record is not None:
            has_caught = record.state == State.FAILED
            self._before = (State.BETWEEN, b"", 0) if has_caught else (record.state, record.what, record.elements)
            record.set(State.WAITING, self._what, self._elements, is_counted=self._counts)
            self._record = record

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        record = self._record
        if record is not None:
            failed = kind is not None and issubclass(kind, Exception)
            if failed:
                record.fail(self._what, self._elements, is_counted=self._counts)
            if self._counts:
                record.collectives += 1
                record.last, record.last_elements = self._what, self._elements
            if not failed:
                record.set(*self._before)
            self._record = None


def note_waits(kind: type, names: Mapping[str, str], *, counts: bool) -> None:
    """Have the methods of a class that it defines itself note that they wait.

    Args:
        names: by the method's name, what it waits for.
        counts: see `waits`.
    """
    for name, what in names.items():
        method = vars(kind).get(name)
        if method is not None and not getattr(method, "__isabstractmethod__", False):
            setattr(kind, name, _noting(method, what, counts))


def _noting(method: Callable[..., Any], what: str, counts: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if _record is None:
            return method(self, *args, **options)
        elements = args[0].numel() if what == "all_reduce" and args and hasattr(args[0], "numel") else 0
        with waits(what, elements, counts=counts):
            return method(self, *args, **options)

    return call


def loading(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches, and note that this rank waits for its data while it draws one."""
    iterator = iter(batches)
    while True:
        record = _own()
        if record is not None:
            record.set(State.LOADER, b"data", 0)
        try:
            batch = next(iterator, _NONE_LEFT)
        finally:
            if record is not None and record.state != State.FAILED:
                record.set(State.BETWEEN, b"", 0)
        if batch is _NONE_LEFT:
            return
        yield batch


_NONE_LEFT = object()


def note_failure(what: str) -> bool:
    """Note that this rank fails; return whether it does so in a collective.

    Args:
        what: the collective by the error's stack, for those that note nothing themselves; "" without one.
    """
    record = _own()
    if record is not None and what and record.state == State.BETWEEN:
        record.fail(what.encode())
    return record is not None and record.state == State.FAILED


def note_phase(phase: str) -> None:
    """Note what this rank does now: "training", "evaluation", "saving", …"""
    if (record := _own()) is not None:
        record.phase(phase)


def note_step() -> None:
    """Note that an optimizer has stepped."""
    if (record := _own()) is not None:
        record.steps += 1
        record.stepped_at.append(time.time_ns())
        record.count()


def note_update(updates: int) -> None:
    """Note the number of updates that this rank has completed."""
    if (record := _own()) is not None:
        record.updates = updates
        record.count()


def progress() -> None:
    """Note that a piece of long work is done, in any thread."""
    if _record is not None:
        _record.progress()


def note_recorded(found: Recorded) -> None:
    """Note what the flight recorder says, in the one thread that reads it."""
    if _record is not None:
        _record.recorded(found)


def steps_before(time_ns: int) -> int:
    """Return how many steps optimizers had taken at a time of `time.time_ns`, in any thread."""
    if _record is None:
        return 0
    return _record.steps - sum(stepped_at > time_ns for stepped_at in tuple(_record.stepped_at))


def note_folder(folder: str) -> None:
    """Note the folder of the run's record, where the ranks' stacks belong."""
    if (record := _own()) is not None:
        record.folder(folder)

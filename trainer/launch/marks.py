"""Marks: what this rank does now, kept where the watcher of its host can read it while the rank itself cannot answer.

The record is a file in memory (memfd), which leaves nothing on a disk, and which the watcher opens through /proc. Its
size is fixed. Only the thread that has made it writes to it, but for `progress`. Without a record, every function here
does nothing.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

SIZE = 1024
"""Bytes of a record."""
ENDED = "ended"
"""Phase of a rank whose script has ended."""
_MAGIC = b"trnmarks"
_HEAD = struct.Struct("<8sqqq")  # magic, process, rank, ident of the main thread
_STATE = struct.Struct("<qqqq24s")  # state, collectives, events, elements; what is waited for
_COUNTS = struct.Struct("<qq")  # steps of optimizers; updates
_PROGRESS = struct.Struct("<q")
_AT_STATE = _HEAD.size
_AT_EVENTS = _AT_STATE + 16
_AT_COUNTS = _AT_STATE + _STATE.size
_AT_PROGRESS = _AT_COUNTS + _COUNTS.size
_PHASE_BYTES, _AT_PHASE = 24, _AT_PROGRESS + _PROGRESS.size
_LAST = struct.Struct("<q24s")  # elements; which collective has returned last, of those that are counted
_AT_LAST = _AT_PHASE + _PHASE_BYTES
_AT_FOLDER = _AT_LAST + _LAST.size


class State(IntEnum):
    """What a rank does."""

    BETWEEN = 0
    """It computes, between two collectives."""
    WAITING = 1
    """It has called a collective, which has not returned."""
    LOADER = 2
    """It waits for its data."""
    FAILED = 3
    """The collective that it had called has ended with an error."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What a record says."""

    pid: int
    rank: int
    thread: int
    """Python's ident of the main thread, which stacks name."""
    state: State
    collectives: int
    """Those that have returned, without those of the gradients."""
    events: int
    """Grows with every change."""
    elements: int
    """Of the tensor that is all-reduced; 0 where it does not matter."""
    what: str
    """What is waited for: "gradients", "all_reduce", …"""
    steps: int
    """Steps of optimizers."""
    updates: int
    progress: int
    """Grows with pieces of long work that are done, such as chunks of a checkpoint."""
    phase: str
    last: str
    """Which collective has returned last, of those that are counted."""
    last_elements: int
    folder: str
    """Of the run's record; empty without one."""


class _Record:
    def __init__(self, rank: int) -> None:
        self.descriptor = os.memfd_create("trainer-marks")
        os.posix_fallocate(self.descriptor, 0, SIZE)  # a page without memory would end this process with SIGBUS
        self._file = mmap.mmap(self.descriptor, SIZE)
        self.thread = threading.get_ident()
        self.state, self.what, self.elements = int(State.BETWEEN), b"", 0
        self.collectives = self.events = self.steps = self.updates = self.pieces = 0
        _HEAD.pack_into(self._file, 0, _MAGIC, os.getpid(), rank, self.thread)

    def set(self, state: int, what: bytes, elements: int) -> None:
        self.state, self.what, self.elements = state, what, elements
        self.events += 1
        _STATE.pack_into(self._file, _AT_STATE, state, self.collectives, self.events, elements, what)

    def count(self) -> None:
        _COUNTS.pack_into(self._file, _AT_COUNTS, self.steps, self.updates)

    def returned(self, what: bytes, elements: int) -> None:
        self.collectives += 1
        _LAST.pack_into(self._file, _AT_LAST, elements, what)

    def phase(self, phase: str) -> None:
        self.events += 1
        struct.pack_into("<q", self._file, _AT_EVENTS, self.events)
        struct.pack_into(f"{_PHASE_BYTES}s", self._file, _AT_PHASE, phase.encode())

    def progress(self) -> None:
        self.pieces += 1
        _PROGRESS.pack_into(self._file, _AT_PROGRESS, self.pieces)

    def folder(self, folder: str) -> None:
        room = SIZE - _AT_FOLDER
        struct.pack_into(f"{room}s", self._file, _AT_FOLDER, folder.encode())


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
            record.set(record.state, record.what, record.elements)  # which tells that a part of it has begun
        elif record is not None:
            self._before = (record.state, record.what, record.elements)
            if record.state == State.FAILED:  # which it has caught
                self._before = (State.BETWEEN, b"", 0)
            record.set(State.WAITING, self._what, self._elements)
            self._record = record

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        record = self._record
        if record is not None:
            failed = kind is not None and issubclass(kind, Exception)
            if failed:
                record.set(State.FAILED, self._what, self._elements)
            if self._counts:
                record.returned(self._what, self._elements)
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
            if record is not None:
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
        record.set(State.FAILED, what.encode(), 0)
    return record is not None and record.state == State.FAILED


def note_phase(phase: str) -> None:
    """Note what this rank does now: "training", "evaluation", "saving", …"""
    if (record := _own()) is not None:
        record.phase(phase)


def note_step() -> None:
    """Note that an optimizer has stepped."""
    if (record := _own()) is not None:
        record.steps += 1
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


def note_folder(folder: str) -> None:
    """Note the folder of the run's record, where the ranks' stacks belong."""
    if (record := _own()) is not None:
        record.folder(folder)


def read_mark(record: bytes) -> Mark | None:
    """Return what a record says; None for anything else."""
    if len(record) != SIZE or not record.startswith(_MAGIC):
        return None
    _, pid, rank, thread = _HEAD.unpack_from(record)
    state, collectives, events, elements, what = _STATE.unpack_from(record, _AT_STATE)
    steps, updates = _COUNTS.unpack_from(record, _AT_COUNTS)
    pieces, (last_elements, last) = *_PROGRESS.unpack_from(record, _AT_PROGRESS), _LAST.unpack_from(record, _AT_LAST)
    return Mark(
        pid=pid, rank=rank, thread=thread, state=State(state), collectives=collectives, events=events,
        elements=elements, what=_text(what), steps=steps, updates=updates, progress=pieces,
        phase=_text(record[_AT_PHASE:_AT_LAST]), last=_text(last), last_elements=last_elements,
        folder=_text(record[_AT_FOLDER:]),
    )  # fmt: skip


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode(errors="replace")

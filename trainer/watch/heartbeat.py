"""The heartbeat of a rank: what it is doing and how far it has come, in a record that other processes read.

The watcher of the rank's host reads it through /proc, so a rank that hangs need not answer. Under `trainer run` it is a
file in the job's folder, which outlives the rank however it ends; otherwise it is a file in memory (memfd), which
leaves nothing on a disk. Its size is fixed. In a process without a record, every function here does nothing.

Only the thread that has made the record writes it, and `version` is odd while it does. Other threads may call only the
functions that say so, which leave `version` alone. So do the numbers by which any thread notes progress.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import mmap
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from ctypes import c_bool, c_char, c_double, c_int64
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from trainer.watch.job_folder import SIGTERM, is_ours, job_folder

PREEMPTED, DONE = "preempted", "done"
"""Phases of a rank that has ended its work, and is to be started again, or is not."""
TRAINING = {"", "joining", "joined", "training"}
"""Phases of a rank that trains. A loop without a loader of ours stays at "joined" until its first step."""
MISTAKE, LOST_PEER = "mistake", "lost peer"
"""Kinds of error, besides names of exceptions: the user's mistake; a failure that another rank has caused."""
GRADIENTS, WEIGHTS = "gradients", "weights"
"""What a rank waits for in an all-reduce of gradients, and in an average of weights."""
BATCH_NORM = "BatchNorm's statistics"
"""Name of the collective by which a BatchNorm over the global batch gets its statistics."""
SIGNAL = getattr(signal, "SIGRTMAX", 64) - 5
"""The signal at which a rank writes its stacks. PyTorch, MPI, NCCL and the schedulers leave it alone."""
_HEAD = re.compile(rb"trainer-heartbeat ([1-9][0-9]{0,6})\n")
"""With the number of a process: Linux has none above 2^22."""
_READINGS = 20
"""How often a reader tries to get a consistent copy."""
_WHAT_BYTES = 48


class State:
    """What a rank notes that it does. Plain numbers, because an enumeration's members are slow to look up."""

    BETWEEN = 0
    """It computes, between two collectives."""
    WAITING = 1
    """It has called a collective, which has not returned."""
    LOADER = 2
    """It waits for its data."""
    FAILED = 3
    """The collective that it had called has ended with an error."""


def _text(size: int) -> Any:
    """Return a field of text, which is cut to so many bytes."""
    return field(default="", metadata={"bytes": size})


@dataclass
class Heartbeat:
    """A copy of a rank's record. Each field here is a field of the record."""

    pid: int = 0
    version: int = 0
    """Odd while the rank writes."""
    rank: int = 0
    thread: int = 0
    """Python's ident of the thread that trains, as stacks show it."""
    native_thread: int = 0
    """The system's id of the same thread."""
    stacks_file: int = 0
    """Its descriptor of the file that gets its stacks; 0 without one."""

    # What it waits for, for the watch.
    state: int = State.BETWEEN
    events: int = 0
    """Grows with every change."""
    what: str = _text(_WHAT_BYTES)
    """What is waited for: "gradients", "all_reduce", …"""
    elements: int = 0
    """Of the tensor that is all-reduced; 0 where it does not matter."""
    is_counted: bool = False
    """Whether `what` is a counted collective: one that all ranks take part in."""
    is_at_end: bool = False
    """Whether its script has come to its end."""
    failures: int = 0
    """Collectives that have ended with an error."""
    collectives: int = 0
    """Counted ones that have returned; those of gradients are not counted."""
    last: str = _text(_WHAT_BYTES)
    """Which of them has returned last."""
    last_elements: int = 0

    # How far it is.
    steps: int = 0
    """Of optimizers."""
    updates: int = 0
    """Completed ones."""
    pieces: int = 0
    """Of long work that are done, such as chunks of a checkpoint."""
    phase: str = _text(24)
    progress_s: float = 0.0
    """Time of its last report of an update or a phase, by its host's monotonic clock."""
    reports: int = 0
    """Phases since its last update: of two ranks at the same update, fewer is behind."""
    first_update: int = 0
    """Number of the first update that it completed since its start; 0 before."""
    first_update_s: float = 0.0

    # How it ends, for `trainer run`.
    signal: int = 0
    """That has asked it to save and end; 0 without one."""
    error: str = _text(80)
    """One of the kinds above, or the class name of an exception."""
    message: str = _text(512)
    folder: str = _text(640)
    """Of the run's record; empty without one."""

    # What PyTorch's flight recorder says of its collectives, over all process groups.
    read_at: float = 0.0
    """By the monotonic clock; 0 without a recorder. Gets old while a thread holds the interpreter's lock."""
    enqueued: int = 0
    completed: int = 0
    pending: str = _text(96)
    """The first that is not completed: "collective 7 of process group 0: nccl:broadcast"; empty where none is known."""

    @property
    def has_ended(self) -> bool:
        """Whether it has reported an end, in good order or with an error."""
        return bool(self.error) or self.phase in (PREEMPTED, DONE)

    @classmethod
    def from_bytes(cls, record: bytes) -> Self | None:
        """Return a copy of a record; None for other bytes, such as a record that is still being made."""
        if len(record) != SIZE:
            return None
        copy = Record.from_buffer_copy(record)
        head = _HEAD.fullmatch(copy.head)
        values = {name: getattr(copy, name) for name, _ in _LAYOUT}
        texts = {name: value.decode(errors="replace") for name, value in values.items() if isinstance(value, bytes)}
        return cls(pid=int(head[1]), **{**values, **texts}) if head else None

    @classmethod
    def from_reader(cls, read: Callable[[], bytes]) -> Self | None:
        """Return a consistent copy of a record; None for other bytes.

        A rank that is stopped or killed while it writes leaves an odd version: its record is returned as it is.

        Args:
            read: returns the bytes of the record, which may change in between.
        """
        before = None
        for _ in range(_READINGS):
            heartbeat = cls.from_bytes(read())
            # Two equal readings with an even version: nothing was written in between, so the first is consistent.
            if heartbeat is None or (heartbeat == before and heartbeat.version % 2 == 0):
                break
            before = heartbeat
        return heartbeat


_KINDS: dict[Any, Any] = {"int": c_int64, "float": c_double, "bool": c_bool}
_LAYOUT = [
    (each.name, c_char * each.metadata["bytes"] if each.metadata else _KINDS[each.type])
    for each in fields(Heartbeat)
    if each.name != "pid"
]


class Record(ctypes.Structure):
    """A heartbeat in shared memory; of this process, as it is written."""

    _fields_ = (("head", c_char * 48), *_LAYOUT)  # the head is a line that a shell can read too

    @classmethod
    def make(cls, descriptor: int, rank: int) -> Record:
        os.posix_fallocate(descriptor, 0, SIZE)  # a page without memory or space would end this process with SIGBUS
        record = cls.from_buffer(mmap.mmap(descriptor, SIZE))
        record.descriptor = descriptor
        record.rank, record.thread, record.native_thread = rank, threading.get_ident(), threading.get_native_id()
        record.head = b"trainer-heartbeat %d\n" % os.getpid()  # last: with it, the bytes are a valid record
        return record

    def set(self: Any, state: int, what: bytes, elements: int, is_counted: bool = False) -> None:
        """Note what this rank does from now on. The collective that it was waiting in is thereby completed."""
        # Not `+= 1`: a signal handler's exception may have interrupted a write, and left the version odd.
        self.version = version = self.version | 1
        if self.is_counted and state != State.FAILED:  # a failed one counts once the rank goes on
            self.collectives += 1
            self.last, self.last_elements = self.what, self.elements
        self.state, self.what, self.elements, self.is_counted = state, what, elements, is_counted
        self.events += 1
        self.version = version + 1

    def fail(self, what: bytes, elements: int = 0, is_counted: bool = False) -> None:
        self.failures += 1
        self.set(State.FAILED, what, elements, is_counted)

    def put(self: Any, **values: Any) -> None:
        """Set fields in one write. In another thread than the record's, a reader may see some of them earlier."""
        # A signal's handler may interrupt a write, which then ends it.
        is_writer = self.thread == threading.get_ident() and self.version % 2 == 0
        self.version += is_writer
        for name, value in values.items():
            is_text = isinstance(value, str)
            setattr(self, name, value.encode()[: getattr(Record, name).size] if is_text else value)
        self.version += is_writer


SIZE = ctypes.sizeof(Record)
"""Bytes of a record."""

_record: Record | None = None


def report_join(rank: int) -> None:
    """Make this rank's record before it joins the others, if `trainer run` has started it."""
    global _record
    folder = job_folder()
    if folder is None or _record is not None:
        return
    with suppress(OSError):  # a full disk must not end a training that does not need it
        if is_ours(folder):
            # If the file exists, it is the rank's, and this process is a child that has inherited its environment.
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            descriptor = os.open(folder / f"rank-{rank}", flags, mode=0o600)
            _record = Record.make(descriptor, rank)
            report_phase("joining")
            atexit.register(_report_exit)
            _note_sigterm(folder / f"{SIGTERM}-{rank}")


def _note_sigterm(file: Path) -> None:
    """Have the file get this thread's stack at SIGTERM, before the signal does what it does without this.

    A launcher sends it to the ranks that a dead rank leaves behind. Most wait in a collective then, where Python runs
    no handler; this handler is in C. A handler that the program sets later replaces it.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600)
    faulthandler.register(signal.SIGTERM, file=descriptor, all_threads=False, chain=True)


def open_record(rank: int) -> Path | None:
    """Have this process watched; return where the watcher finds its record, or None at a second call.

    At `SIGNAL`, a file in memory gets the stacks of all threads.

    Raises:
        OSError: the system cannot make a file in memory.
    """
    global _record
    if _record is None:
        _record = Record.make(os.memfd_create("trainer-heartbeat"), rank)
    if _record.stacks_file:
        return None
    _record.stacks_file = stacks = os.memfd_create("trainer-stacks")
    faulthandler.register(SIGNAL, file=stacks, all_threads=True, chain=False)
    atexit.register(_note_end)
    return Path(f"/proc/{os.getpid()}/fd/{_record.descriptor}")


def _forget() -> None:
    # A forked child, such as a loader's worker, shares the memory and the files, and must not write to them.
    global _record
    if _record is not None:
        faulthandler.unregister(signal.SIGTERM)
    _record = None


os.register_at_fork(after_in_child=_forget)


def writable() -> Record | None:
    """Return the record in the thread that has made it; None without one, and in other threads."""
    return _record if _record is not None and _record.thread == threading.get_ident() else None


class waits:  # noqa: N801 (read as what it does: `with waits(…):`)
    """A context in which this rank waits for others. A context within another counts as a part of it.

    Args:
        what: name of what is waited for.
        elements: how many the tensor has; 0 if that may differ between ranks.
        counts: whether it is a counted collective, in which all ranks take part.
    """

    def __init__(self, what: str, elements: int = 0, *, counts: bool = False) -> None:
        self._noted = what.encode()[:_WHAT_BYTES], elements, counts

    def __enter__(self) -> None:
        self._record = record = writable()
        if record is not None and record.state == State.WAITING:
            record.events += 1  # progress: a part of the wait has begun
            self._record = None
        elif record is not None:
            # After a collective's error that was caught, nothing is waited for any more.
            is_between = record.state in (State.BETWEEN, State.FAILED)
            self._before = (State.BETWEEN, b"", 0) if is_between else (record.state, record.what, record.elements)
            record.set(State.WAITING, *self._noted)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._record is not None and kind is not None and issubclass(kind, Exception):
            self._record.fail(*self._noted)
        elif self._record is not None:
            self._record.set(*self._before)


def note_waits(kind: type, names: Iterable[str]) -> None:
    """Note the counted collectives among a class's methods: wrap those that it defines itself in `waits`."""
    for name in names:
        method = vars(kind).get(name)
        if method is not None and not getattr(method, "__isabstractmethod__", False):
            setattr(kind, name, _noting(method, name))


def _noting(method: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        elements = args[0].numel() if what == "all_reduce" and args and hasattr(args[0], "numel") else 0
        with waits(what, elements, counts=True):
            return method(self, *args, **options)

    return call


def report_step(updates: int, *, is_new: bool) -> None:
    """Note a step of an optimizer, and the number of updates that this rank has completed. Takes a microsecond or two.

    Args:
        is_new: whether this step has completed another update.
    """
    record: Any = writable()
    if record is None:
        return
    record.version = version = record.version | 1
    record.steps += 1
    record.events += 1
    if is_new:
        record.updates, record.progress_s, record.reports = updates, time.monotonic(), 0
        if not record.first_update:
            record.first_update, record.first_update_s = updates, record.progress_s
    record.version = version + 1


def report_phase(phase: str) -> None:
    """Note, in any thread, what this rank does now: "training", "evaluation", "saving", …

    Counts as progress for `trainer run`; for the watch of hangs only in the thread that trains.
    """
    record: Any = _record
    if record is None:
        return
    record.reports += 1
    record.progress_s = time.monotonic()
    if record.phase != phase.encode():
        record.put(phase=phase)
    if record.thread == threading.get_ident():
        record.events += 1


def progress() -> None:
    """Note that a piece of long work is done, in any thread."""
    if _record is not None:
        _record.pieces += 1


def note(**values: Any) -> None:
    """Note, in any thread or a signal's handler, fields that no other function here writes."""
    if _record is not None:
        _record.put(**values)


def report_failure(kind: str, message: str, rank: int, collective: str = "") -> bool:
    """Note, in any thread, the error that ends this rank; return whether it is a collective's.

    Args:
        rank: this rank's number, as it may not have joined yet.
        collective: that has failed by the error's stack, used if the rank has noted no wait; "" if none.
    """
    report_join(rank)
    if _record is not None:
        _record.put(error=kind, message=message)
    if (record := writable()) is None:
        return False
    if collective and record.state == State.BETWEEN:
        record.fail(collective.encode()[:_WHAT_BYTES])
    return bool(record.state == State.FAILED)


def _note_end() -> None:
    """Note, as Python exits, that the script has come to its end, unless an exception has ended it."""
    if getattr(sys, "last_type", None) is None and (record := writable()) is not None:
        record.put(is_at_end=True, events=record.events + 1)


def _report_exit() -> None:
    # Python exits in good order also after sys.exit(1): only the launcher's exit code says whether the rank failed.
    if _record is not None and _record.phase != PREEMPTED.encode():
        report_phase(DONE)

"""The heartbeat of a rank: what it does now and how far it is, in one record that other processes read.

The watcher of its host reads it through /proc, while the rank itself cannot answer. Under `trainer run` it is a file in
the job's folder, which is there whichever way the rank ends; else it is a file in memory (memfd), which leaves nothing
on a disk. Its size is fixed. Without a record, every function here does nothing.

One thread writes, that which has made the record, and makes `version` odd while it does. Other threads write nothing
but what their functions say.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import mmap
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from ctypes import c_bool, c_char, c_double, c_int64, c_uint8, c_uint64
from pathlib import Path
from typing import Any, ClassVar, Self

from trainer.watch.job_folder import is_ours, job_folder

PREEMPTED, DONE = "preempted", "done"
"""Phases of a rank that has ended its work: to be started again, or not."""
SAVING = "saving"
"""The phase of a rank that saves a checkpoint."""
TRAINING = {"", "joining", "joined", "training"}
"""Phases of a rank that trains. A loop without a loader of ours stays at "joined" until its first step."""
MISTAKE, LOST_PEER = "mistake", "lost peer"
"""Kinds of error, beside names of exceptions: a mistake of the user's; a failure that another rank's has caused."""
BATCH_NORM = "BatchNorm's statistics"
"""Name of the collective by which a BatchNorm over the global batch gets its statistics."""
SIGNAL = getattr(signal, "SIGRTMAX", 64) - 5
"""The signal at which a rank writes its stacks. PyTorch, MPI, NCCL and the schedulers leave it alone."""
_MAGIC = b"trainer-heartbeat "
_WHAT_BYTES = 48
_MOST_STEPS = 64
"""Steps whose times are kept: a rank's program is never so many steps ahead of its device."""
_READINGS = 20
_NONE_LEFT = object()


class State:
    """What a rank does: plain numbers, as members of an enumeration are slow to look up."""

    BETWEEN = 0
    """It computes, between two collectives."""
    WAITING = 1
    """It has called a collective, which has not returned."""
    LOADER = 2
    """It waits for its data."""
    FAILED = 3
    """The collective that it had called has ended with an error."""


def _text(name: str) -> Any:
    """Return a property for a field of bytes, whose text is cut to its size."""

    def get(record: Any) -> str:
        text: bytes = getattr(record, name)
        return text.decode(errors="replace")

    def put(record: Any, text: str) -> None:
        setattr(record, name, text.encode()[: getattr(type(record), name).size])

    return property(get, put)


class Recorded(ctypes.Structure):
    """PyTorch's flight recorder of this rank's collectives, those of all process groups together.

    `pending` is the name of the first that is not completed: "gradients", "all_reduce", …; empty where none is known.
    `group` is its process group, such as "NCCL 0".
    """

    _fields_ = (
        ("read_at", c_double),  # monotonic clock; 0 without a recorder. Who holds the interpreter's lock keeps it old.
        ("enqueued", c_int64),
        ("completed", c_int64),
        ("number", c_int64),  # in its process group
        ("pending_elements", c_int64),
        ("steps_before", c_int64),  # steps of optimizers before it
        ("_pending", c_char * 24),
        ("_group", c_char * 24),
    )
    pending, group = _text("_pending"), _text("_group")


class Heartbeat(ctypes.Structure):
    """What a rank does now, and how far it is: a copy, or the record itself."""

    _fields_ = (
        ("_head", c_char * 48),  # a line of text that a shell can read too: the magic and the process
        ("version", c_uint64),  # odd while the rank writes
        ("rank", c_int64),
        ("thread", c_int64),  # that trains: Python's ident, by which stacks name it
        ("native_thread", c_int64),  # the system's number of the same
        ("stacks_file", c_int64),  # its descriptor of the file that gets its stacks; 0 without one
        # What it waits for, for the watch.
        ("state", c_int64),
        ("events", c_int64),  # grows with every change
        ("_what", c_char * _WHAT_BYTES),  # what is waited for: "gradients", "all_reduce", …
        ("elements", c_int64),  # of the tensor that is all-reduced; 0 where it does not matter
        ("is_counted", c_bool),  # whether what is waited for is one of the collectives that are counted
        ("is_at_end", c_bool),  # its script has come to its end
        ("signal", c_uint8),  # that has asked it to save and end; 0 without one
        ("failures", c_int64),  # collectives that have ended with an error
        ("collectives", c_int64),  # that have returned, without those of the gradients
        ("_last", c_char * _WHAT_BYTES),  # which of them has returned last
        ("last_elements", c_int64),
        # How far it is.
        ("steps", c_int64),  # of optimizers
        ("updates", c_int64),  # completed
        ("pieces", c_int64),  # of long work that are done, such as chunks of a checkpoint
        ("_phase", c_char * 24),
        ("progress_s", c_double),  # when it reported an update or a phase last, by its host's monotonic clock
        ("reports", c_int64),  # phases since its last update: of two ranks in the same update, fewer is behind
        ("first_update", c_int64),  # that it completed after its start; 0 before
        ("first_update_s", c_double),  # when that was
        # How it ends, for `trainer run`. The error is one of the kinds above, or the class name of an exception.
        ("_error", c_char * 80),
        ("_message", c_char * 512),
        ("_folder", c_char * 640),  # of the run's record; empty without one
        ("recorded", Recorded),
    )
    _anonymous_: ClassVar = ("recorded",)
    what, last, phase = _text("_what"), _text("_last"), _text("_phase")
    error, message, folder = _text("_error"), _text("_message"), _text("_folder")
    pending, group = _text("_pending"), _text("_group")

    @property
    def pid(self) -> int:
        return int(self._head.removeprefix(_MAGIC))

    @pid.setter
    def pid(self, process: int) -> None:
        self._head = b"%s%d\n" % (_MAGIC, process)

    @property
    def has_ended(self) -> bool:
        """Whether it has reported an end, in good order or with an error."""
        return bool(self.error) or self.phase in (PREEMPTED, DONE)

    @classmethod
    def from_bytes(cls, record: bytes) -> Self | None:
        """Return a copy of a record; None for anything else, and for one that is being made."""
        return cls.from_buffer_copy(record) if len(record) == SIZE and record.startswith(_MAGIC) else None

    @classmethod
    def from_reader(cls, read: Callable[[], bytes]) -> Self | None:
        """Return a copy of a record that is of one moment; None for anything else.

        A rank that is stopped or killed while it writes leaves an odd version, which is taken as it is in the end.

        Args:
            read: returns the bytes of the record, which may change in between.
        """
        before = None
        for _ in range(_READINGS):
            record = read()
            heartbeat = cls.from_bytes(record)
            # Nothing was written between two readings that are equal, and the first of them was of one moment.
            if heartbeat is None or (record == before and heartbeat.version % 2 == 0):
                break
            before = record
        return heartbeat


SIZE = ctypes.sizeof(Heartbeat)
"""Bytes of a record."""


class _Record(Heartbeat):
    """The record of this process. Its own attributes beside the record are not shared."""

    descriptor: int
    is_watched: bool
    is_in_memory: bool
    stepped_at: deque[int]
    """Times of its latest steps."""
    # Fields of the record that are computed with here, for the type checker.
    version: int
    elements: int
    is_counted: bool
    _what: bytes

    @classmethod
    def make(cls, descriptor: int, rank: int, *, is_in_memory: bool) -> _Record:
        os.posix_fallocate(descriptor, 0, SIZE)  # a page without memory or space would end this process with SIGBUS
        record = cls.from_buffer(mmap.mmap(descriptor, SIZE))
        record.descriptor, record.is_in_memory, record.is_watched = descriptor, is_in_memory, False
        record.stepped_at = deque(maxlen=_MOST_STEPS)
        record.rank, record.thread, record.native_thread = rank, threading.get_ident(), threading.get_native_id()
        record.pid = os.getpid()  # last, because it makes a record of it
        return record

    def set(self, state: int, what: bytes, elements: int, is_counted: bool = False) -> None:
        """Note what this rank does from now on. What it has waited for before is done."""
        # Not `+= 1`: an exception of a signal's handler may have left it odd.
        self.version = version = self.version | 1
        if self.is_counted and state != State.FAILED:  # one that has failed is done when its error was caught
            self.collectives += 1
            self._last, self.last_elements = self._what, self.elements
        self.state, self._what, self.elements, self.is_counted = state, what, elements, is_counted
        self.events += 1
        self.version = version + 1

    def fail(self, what: bytes, elements: int = 0, is_counted: bool = False) -> None:
        self.failures += 1
        self.set(State.FAILED, what, elements, is_counted)

    def put(self, **fields: Any) -> None:
        """Set fields at once. In a thread that has not made the record, a reader may see some of them earlier."""
        version, is_writer = self.version | 1, self.thread == threading.get_ident()
        if is_writer:
            self.version = version
        for name, value in fields.items():
            setattr(self, name, value)
        if is_writer:
            self.version = version + 1


_record: _Record | None = None


def report_join(rank: int) -> None:
    """Make the record of this rank, which is about to join the others, if `trainer run` has started it."""
    global _record
    folder = job_folder()
    if folder is None or _record is not None:
        return
    with suppress(OSError):  # a full disk ends no training that does not need the disk
        folder.mkdir(mode=0o700, exist_ok=True)
        if is_ours(folder):
            # One that is there belongs to the rank: this process is a child of it that has inherited its environment.
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            descriptor = os.open(folder / f"rank-{rank}", flags, mode=0o600)
            _record = _Record.make(descriptor, rank, is_in_memory=False)
            report_phase("joining")
            atexit.register(_report_exit)


def open_record(rank: int, stacks: int = 0) -> Path | None:
    """Return where the watcher finds the record of this process, which is made if need be; None at a second call.

    Args:
        stacks: descriptor of the file that gets this process's stacks at `SIGNAL`.

    Raises:
        OSError: the system has no such files.
    """
    global _record
    if _record is None:
        _record = _Record.make(os.memfd_create("trainer-heartbeat"), rank, is_in_memory=True)
    if _record.is_watched:
        return None
    _record.is_watched, _record.stacks_file = True, stacks
    return Path(f"/proc/{os.getpid()}/fd/{_record.descriptor}")


def close_record() -> None:
    """End the record, unless `trainer run` reads it too: nothing is watched."""
    global _record
    if _record is not None:
        _record.is_watched = False
        if _record.is_in_memory:
            os.close(_record.descriptor)
            _record = None


def _forget() -> None:
    # A child, such as a loader's worker, shares the memory.
    global _record
    _record = None


os.register_at_fork(after_in_child=_forget)


def _writable() -> _Record | None:
    """Return the record in the thread that has made it; None without one, and in other threads."""
    return _record if _record is not None and _record.thread == threading.get_ident() else None


class waits:  # noqa: N801 (a context, as contextlib's are)
    """Context in which this rank waits for others. A context within another is a part of it.

    Args:
        what: is waited for.
        elements: of the tensor; 0 where the ranks' may differ.
        counts: whether it is one of the collectives that are counted, in which all ranks take part.
    """

    def __init__(self, what: str, elements: int = 0, *, counts: bool = False) -> None:
        self._what, self._elements, self._counts = what.encode()[:_WHAT_BYTES], elements, counts
        self._record: _Record | None = None

    def __enter__(self) -> None:
        record = _writable()
        if record is None:
            return
        state = record.state
        if state == State.WAITING:
            record.events += 1  # which tells that a part of it has begun
            return
        # After an error that was caught nothing is waited for.
        is_between = state in (State.BETWEEN, State.FAILED)
        self._before = (State.BETWEEN, b"", 0) if is_between else (state, record._what, record.elements)
        record.set(State.WAITING, self._what, self._elements, self._counts)
        self._record = record

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        record = self._record
        if record is not None:
            if kind is not None and issubclass(kind, Exception):
                record.fail(self._what, self._elements, self._counts)
            else:
                record.set(*self._before)
            self._record = None


def note_waits(kind: type, names: Mapping[str, str], *, counts: bool) -> None:
    """Wrap methods of a class in `waits`, those that it defines itself.

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
        record = _writable()
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


class UpdateCounter:
    """Counts the updates of a run, and reports each."""

    def __init__(self) -> None:
        self.count = 0
        """Completed updates. A run that goes on from a checkpoint sets it to the checkpoint's."""
        self._is_counted = False

    def on_batch(self) -> None:
        """Note that a loader yields a batch."""
        self._is_counted = False
        report_phase("training")

    def on_step(self, has_loader: bool) -> None:
        """Note a step of an optimizer. Those of several optimizers on a loader's batch are one update."""
        note_step()
        if not has_loader:
            report_phase("training")  # no batch says so: a checkpoint's phase would never end
        if not (has_loader and self._is_counted):
            self.count += 1
            self._is_counted = True
            report_update(self.count)


def note_step() -> None:
    """Note that an optimizer has stepped."""
    if (record := _writable()) is not None:
        record.steps += 1
        record.stepped_at.append(time.time_ns())


def steps_before(time_ns: int) -> int:
    """Return how many steps optimizers had taken at a time of `time.time_ns`, in any thread."""
    if _record is None:
        return 0
    steps: int = _record.steps
    return steps - sum(stepped_at > time_ns for stepped_at in tuple(_record.stepped_at))


def report_update(updates: int) -> None:
    """Note the number of updates that this rank has completed. Takes a microsecond at most."""
    if (record := _writable()) is not None:
        now = time.monotonic()
        first = {} if record.first_update else {"first_update": updates, "first_update_s": now}
        record.put(updates=updates, progress_s=now, reports=0, **first)


def report_phase(phase: str) -> None:
    """Note in any thread what this rank does now: "training", "evaluation", "saving", …

    Counts as progress for `trainer run`; for the watch of hangs only in the thread that trains.
    """
    if _record is not None:
        _record.put(phase=phase, reports=_record.reports + 1, progress_s=time.monotonic())
        if (record := _writable()) is not None:
            record.events += 1


def progress() -> None:
    """Note that a piece of long work is done, in any thread."""
    if _record is not None:
        _record.pieces += 1


def note_recorded(recorded: Recorded) -> None:
    """Note what the flight recorder says, in the one thread that reads it."""
    if _record is not None:
        _record.recorded = recorded  # in one piece: single fields would look like progress


def note_folder(folder: str) -> None:
    """Note the folder of the run's record, where the ranks' stacks belong."""
    if (record := _writable()) is not None:
        record.put(folder=folder)


def report_signal(number: int) -> None:
    """Note in any thread that this rank was asked to end: if it dies without that, its launcher has not ended it."""
    if _record is not None:
        _record.signal = number


def report_failure(kind: str, message: str, rank: int, collective: str = "") -> bool:
    """Note in any thread with which error this rank ends; return whether the error is of a collective.

    Args:
        rank: this one, which may not have joined yet.
        collective: that has failed by the error's stack, where it has noted nothing itself; "" without one.
    """
    report_join(rank)
    if _record is not None:
        _record.put(error=kind, message=message)
    if (record := _writable()) is None:
        return False
    if collective and record.state == State.BETWEEN:
        record.fail(collective.encode()[:_WHAT_BYTES])
    return bool(record.state == State.FAILED)


def note_end() -> None:
    """Note, as Python ends, that the script has come to its end, unless a hook has shown an exception."""
    if getattr(sys, "last_type", None) is None and (record := _writable()) is not None:
        record.put(is_at_end=True, events=record.events + 1)


def _report_exit() -> None:
    # Python ends in good order, which it also does after sys.exit: the launcher's exit code tells more.
    if _record is not None and _record.phase != PREEMPTED:
        report_phase(DONE)

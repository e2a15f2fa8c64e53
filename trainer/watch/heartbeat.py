"""The heartbeat of a rank: what it is doing and how far it has come, in a record that other processes read.

The watcher of the rank's host reads it through /proc, so a rank that hangs need not answer. Under `trainer run` it is a
file in the job's folder, which outlives the rank however it ends; otherwise it is a file in memory (memfd), which
leaves nothing on a disk. Its size is fixed. In a process without a record, every function here does nothing.

Only the thread that has made the record writes it, and `version` is odd while it does. Other threads may call only the
functions that say so, which leave `version` alone.
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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from ctypes import c_bool, c_char, c_double, c_int64, c_uint8, c_uint64
from pathlib import Path
from typing import Any, ClassVar, Self

from trainer.watch.job_folder import SIGTERM, is_ours, job_folder

PREEMPTED, DONE = "preempted", "done"
"""Phases of a rank that has ended its work, and is to be started again, or is not."""
SAVING = "saving"
"""The phase of a rank that saves a checkpoint."""
TRAINING = {"", "joining", "joined", "training"}
"""Phases of a rank that trains. A loop without a loader of ours stays at "joined" until its first step."""
MISTAKE, LOST_PEER = "mistake", "lost peer"
"""Kinds of error, besides names of exceptions: the user's mistake; a failure that another rank has caused."""
BATCH_NORM = "BatchNorm's statistics"
"""Name of the collective by which a BatchNorm over the global batch gets its statistics."""
SIGNAL = getattr(signal, "SIGRTMAX", 64) - 5
"""The signal at which a rank writes its stacks. PyTorch, MPI, NCCL and the schedulers leave it alone."""
_MAGIC = b"trainer-heartbeat "
_HEAD = re.compile(re.escape(_MAGIC) + rb"[1-9][0-9]{0,6}\n")
"""With the number of a process: Linux has none above 2^22."""
_WHAT_BYTES = 48
_MOST_STEPS = 64
"""Steps whose times are kept: a rank's program is never so many steps ahead of its device."""
_READINGS = 20
"""How often a reader tries to get a consistent copy."""
_NONE_LEFT = object()


class State:
    """What a rank does. Plain numbers, because an enumeration's members are slow to look up."""

    BETWEEN = 0
    """It computes, between two collectives."""
    WAITING = 1
    """It has called a collective, which has not returned."""
    LOADER = 2
    """It waits for its data."""
    FAILED = 3
    """The collective that it had called has ended with an error."""


def _text(name: str) -> Any:
    """Return a property that holds text in a field of bytes, cut to the field's size."""

    def get(record: Any) -> str:
        text: bytes = getattr(record, name)
        return text.decode(errors="replace")

    def put(record: Any, text: str) -> None:
        setattr(record, name, text.encode()[: getattr(type(record), name).size])

    return property(get, put)


class Recorded(ctypes.Structure):
    """What PyTorch's flight recorder says of this rank's collectives, over all process groups.

    `pending` is the name of the first that is not completed: "gradients", "all_reduce", …; empty where none is known.
    `group` is its process group, such as "NCCL 0".
    """

    _fields_ = (
        ("read_at", c_double),  # monotonic clock; 0 without a recorder. Gets old while a thread holds the GIL.
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
    """What a rank is doing, and how far it has come: a copy, or the record itself."""

    _fields_ = (
        ("_head", c_char * 48),  # a line of text that a shell can read too: the magic and the process
        ("version", c_uint64),  # odd while the rank writes
        ("rank", c_int64),
        ("thread", c_int64),  # Python's ident of the thread that trains, as stacks show it
        ("native_thread", c_int64),  # the system's id of the same thread
        ("stacks_file", c_int64),  # its descriptor of the file that gets its stacks; 0 without one
        # What it waits for, for the watch.
        ("state", c_int64),
        ("events", c_int64),  # grows with every change
        ("_what", c_char * _WHAT_BYTES),  # what is waited for: "gradients", "all_reduce", …
        ("elements", c_int64),  # of the tensor that is all-reduced; 0 where it does not matter
        ("is_counted", c_bool),  # whether `what` is a counted collective: one that all ranks take part in
        ("is_at_end", c_bool),  # its script has come to its end
        ("signal", c_uint8),  # that has asked it to save and end; 0 without one
        ("failures", c_int64),  # collectives that have ended with an error
        ("collectives", c_int64),  # counted ones that have returned; those of gradients are not counted
        ("_last", c_char * _WHAT_BYTES),  # which of them has returned last
        ("last_elements", c_int64),
        # How far it is.
        ("steps", c_int64),  # of optimizers
        ("updates", c_int64),  # completed
        ("pieces", c_int64),  # of long work that are done, such as chunks of a checkpoint
        ("_phase", c_char * 24),
        ("progress_s", c_double),  # time of its last report of an update or a phase, by its host's monotonic clock
        ("reports", c_int64),  # phases since its last update: of two ranks at the same update, fewer is behind
        ("first_update", c_int64),  # number of the first update that it completed since its start; 0 before
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
        """Return a copy of a record; None for other bytes, such as a record that is still being made."""
        copy = cls.from_buffer_copy(record) if len(record) == SIZE else None
        return copy if copy and _HEAD.fullmatch(copy._head) else None

    @classmethod
    def from_reader(cls, read: Callable[[], bytes]) -> Self | None:
        """Return a consistent copy of a record; None for other bytes.

        A rank that is stopped or killed while it writes leaves an odd version: its record is returned as it is.

        Args:
            read: returns the bytes of the record, which may change in between.
        """
        before = None
        for _ in range(_READINGS):
            record = read()
            heartbeat = cls.from_bytes(record)
            # Two equal readings with an even version: nothing was written in between, so the first is consistent.
            if heartbeat is None or (record == before and heartbeat.version % 2 == 0):
                break
            before = record
        return heartbeat


SIZE = ctypes.sizeof(Heartbeat)
"""Bytes of a record."""


class _Record(Heartbeat):
    """This process's record. The attributes below are Python's, and not in the shared memory."""

    descriptor: int
    is_watched: bool
    is_in_memory: bool
    stepped_at: deque[int]
    """Times of its latest steps."""
    # For the type checker: fields of the record that are used in arithmetic here.
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
        record.pid = os.getpid()  # last: with it, the bytes are a valid record
        return record

    def set(self, state: int, what: bytes, elements: int, is_counted: bool = False) -> None:
        """Note what this rank does from now on. The collective that it was waiting in is thereby completed."""
        # Not `+= 1`: a signal handler's exception may have interrupted a write, and left the version odd.
        self.version = version = self.version | 1
        if self.is_counted and state != State.FAILED:  # a failed one counts once the rank goes on
            self.collectives += 1
            self._last, self.last_elements = self._what, self.elements
        self.state, self._what, self.elements, self.is_counted = state, what, elements, is_counted
        self.events += 1
        self.version = version + 1

    def fail(self, what: bytes, elements: int = 0, is_counted: bool = False) -> None:
        self.failures += 1
        self.set(State.FAILED, what, elements, is_counted)

    def put(self, **fields: Any) -> None:
        """Set fields in one write. In another thread than the record's, a reader may see some of them earlier."""
        version, is_writer = self.version | 1, self.thread == threading.get_ident()
        if is_writer:
            self.version = version
        for name, value in fields.items():
            setattr(self, name, value)
        if is_writer:
            self.version = version + 1


_record: _Record | None = None


def report_join(rank: int) -> None:
    """Make this rank's record before it joins the others, if `trainer run` has started it."""
    global _record
    folder = job_folder()
    if folder is None or _record is not None:
        return
    with suppress(OSError):  # a full disk must not end a training that does not need it
        folder.mkdir(mode=0o700, exist_ok=True)
        if is_ours(folder):
            # If the file exists, it is the rank's, and this process is a child that has inherited its environment.
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            descriptor = os.open(folder / f"rank-{rank}", flags, mode=0o600)
            _record = _Record.make(descriptor, rank, is_in_memory=False)
            report_phase("joining")
            atexit.register(_report_exit)
            _note_sigterm(folder / f"{SIGTERM}-{rank}")


def _note_sigterm(file: Path) -> None:
    """Have the file get this thread's stack at SIGTERM, before the signal does what it does without this.

    A launcher sends it to the ranks that a dead one leaves behind. Most wait in a collective then, where Python runs no
    handler; this one is in C. A handler that the program sets later takes its place.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600)
    faulthandler.register(signal.SIGTERM, file=descriptor, all_threads=False, chain=True)


def open_record(rank: int, stacks: int = 0) -> Path | None:
    """Return the path where the watcher finds this process's record, made if need be; None at a second call.

    Args:
        stacks: descriptor of the file that gets this process's stacks at `SIGNAL`.

    Raises:
        OSError: the system cannot make a file in memory.
    """
    global _record
    if _record is None:
        _record = _Record.make(os.memfd_create("trainer-heartbeat"), rank, is_in_memory=True)
    if _record.is_watched:
        return None
    _record.is_watched, _record.stacks_file = True, stacks
    return Path(f"/proc/{os.getpid()}/fd/{_record.descriptor}")


def close_record() -> None:
    """Close the record, as the watch ends, unless `trainer run` reads it too."""
    global _record
    if _record is not None:
        _record.is_watched = False
        if _record.is_in_memory:
            os.close(_record.descriptor)
            _record = None


def _forget() -> None:
    # A forked child, such as a loader's worker, shares the memory and the files, and must not write to them.
    global _record
    if _record is not None:
        faulthandler.unregister(signal.SIGTERM)
    _record = None


os.register_at_fork(after_in_child=_forget)


def _writable() -> _Record | None:
    """Return the record in the thread that has made it; None without one, and in other threads."""
    return _record if _record is not None and _record.thread == threading.get_ident() else None


class waits:  # noqa: N801 (a context, as contextlib's are)
    """Context manager in which this rank waits for others. A context within another counts as a part of it.

    Args:
        what: name of what is waited for.
        elements: how many the tensor has; 0 if that may differ between ranks.
        counts: whether it is a counted collective, in which all ranks take part.
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
            record.events += 1  # progress: a part of the wait has begun
            return
        # After a collective's error that was caught, nothing is waited for any more.
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
    """Wrap methods of a class in `waits`, but only those that the class itself defines.

    Args:
        names: what each method waits for, by the method's name.
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
        """Note a step of an optimizer. Steps of several optimizers on the same loader's batch are one update."""
        note_step()
        if not has_loader:
            report_phase("training")  # as no batch does; else the phase of a checkpoint would never end
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
    """Return how many steps optimizers had taken by a time, as of `time.time_ns`. For any thread."""
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
    """Note, in any thread, what this rank does now: "training", "evaluation", "saving", …

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
        _record.recorded = recorded  # as a whole: changes of single fields would look like progress


def note_folder(folder: str) -> None:
    """Note the folder of the run's record, where the ranks' stacks belong."""
    if (record := _writable()) is not None:
        record.put(folder=folder)


def report_signal(number: int) -> None:
    """Note, in any thread, the signal that asked this rank to end. Without it, its launcher has not ended it."""
    if _record is not None:
        _record.signal = number


def report_failure(kind: str, message: str, rank: int, collective: str = "") -> bool:
    """Note, in any thread, the error that ends this rank; return whether it is a collective's.

    Args:
        rank: this rank's number, as it may not have joined yet.
        collective: the one that has failed according to the error's stack, if it has noted no wait; "" if none.
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
    """Note, as Python exits, that the script has come to its end, unless an exception has ended it."""
    if getattr(sys, "last_type", None) is None and (record := _writable()) is not None:
        record.put(is_at_end=True, events=record.events + 1)


def _report_exit() -> None:
    # Python exits in good order also after sys.exit(1): only the launcher's exit code says whether the rank failed.
    if _record is not None and _record.phase != PREEMPTED:
        report_phase(DONE)

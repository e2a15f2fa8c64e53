"""The ranks of one host, as its watcher sees them: their heartbeats, their processes, their stacks, and their end.

The stacks come from `faulthandler`, which is in the standard library: its handler writes them without asking for the
interpreter's lock, so that a rank which holds it in C code is seen too, and no permission to trace is needed. The rank
has registered it for `SIGNAL`, with a file in memory. A process that is stopped, or has the signal blocked, has none.
"""

from __future__ import annotations

import mmap
import os
import re
import select
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainer.cluster.processes import GONE, Process, children_cpu_s, look
from trainer.ops.watcher.job import STOPPED, UNINTERRUPTIBLE, WORKS, View
from trainer.watch.heartbeat import SAVING, SIGNAL, SIZE, State
from trainer.watch.stack import Frame, collective_of, frames_of, has_called, is_in_backward, main_frames, place_of

_LOOK_S = 1.0
_WORKS = 0.1
"""A thread, or a rank's children, that take more than this share of a processor are at work, also on a busy host."""
_WAITS = 0.2
"""In a backward pass, a rank that takes more than this share of a processor computes, and does not wait for others."""
_FRESH_S = 2.0
"""How long a reading of the flight recorder counts; there are four a second."""
_WRITTEN_S, _SETTLED_S = 3.0, 0.15
_MOST_BYTES = 256 * 1024
_TERMINATED_S = 3.0
# Those of a compiler at work; other files of torch._dynamo are in the stack of every compiled model that runs.
_COMPILER = re.compile(
    r"/torch/(_dynamo/convert_frame|_inductor/(compile_fx|async_compile))\.py$|/triton/(compiler|backends)/"
)
_DEBUGGER = re.compile(r"/(pdb|bdb)\.py$|/(pydevd|debugpy|_pydevd_bundle|ipdb|pudb)(/|\.py$)")
# It writes or reads a file, which a slow disk keeps from computing.
_SAVES = re.compile(r"/torch/(serialization\.py$|distributed/checkpoint/)")


class LocalRank:
    """A rank of this host.

    Args:
        record: where its process has its heartbeat: "/proc/<pid>/fd/<descriptor>".

    Raises:
        OSError, ValueError: this process may not look at it, or it is gone.
    """

    def __init__(self, rank: int, record: str) -> None:
        self.pid = int(Path(record).parts[2])
        # First: what is read afterwards is of this process, or of none, and no later one of that number is signalled.
        self.process = os.pidfd_open(self.pid)
        with Path(record).open("rb") as file:
            self._record = mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ)
        heartbeat = View.from_reader(self._read)
        if heartbeat is None or (heartbeat.pid, heartbeat.rank) != (self.pid, rank):
            raise OSError("its heartbeat is another process's")
        self._thread, self._native_thread = heartbeat.thread, heartbeat.native_thread
        self.stacks_file = os.open(f"/proc/{self.pid}/fd/{heartbeat.stacks_file}", os.O_RDONLY)
        self._looked_at, self._look, self._cpu, self._state = 0.0, Process("S", 0.0), 0.0, "S"
        self._counters: tuple[int, ...] = ()
        self._went_on = (0.0, 0.0)
        """When it did something last, and its thread's processor time then."""

    @property
    def is_gone(self) -> bool:
        return bool(select.select([self.process], [], [], 0)[0])

    def _read(self) -> bytes:
        return self._record[:]

    def view(self) -> View:
        """Return what it does now."""
        self._look_again(time.monotonic())
        view = View.from_reader(self._read)
        assert view is not None  # noqa: S101 (it was one, and its head never changes)
        view.process, view.cpu = GONE if self.is_gone else self._state, self._cpu
        if view.counters != self._counters:
            self._counters, self._went_on = view.counters, (self._looked_at, self._look.cpu_s)
        return view

    def _look_again(self, now: float) -> None:
        if (passed := now - self._looked_at) < _LOOK_S:
            return
        process, before = look(self.pid, thread=self._native_thread), self._look
        self._cpu = min(1.0, (process.cpu_s - before.cpu_s) / passed) if self._looked_at else 0.0
        # A healthy process is in uninterruptible sleep for moments.
        is_moment = process.state == UNINTERRUPTIBLE and before.state != UNINTERRUPTIBLE
        self._state, self._look, self._looked_at = "S" if is_moment else process.state, process, now

    def ask(self) -> int | None:
        """Have it write its stacks; return how much was in the file before, or None where it cannot."""
        before = os.fstat(self.stacks_file).st_size
        if self.view().process in (GONE, STOPPED, UNINTERRUPTIBLE) or not takes_signal(self.pid):
            return None
        self.signal(SIGNAL)
        return before

    def with_stacks(self, before: int | None, *, children_work: bool) -> View:
        """Return what it does now, with the stacks that it was asked for and has written.

        Args:
            before: what `ask` has returned.
            children_work: whether its children, such as the workers of a loader, have computed meanwhile.
        """
        view = self.view()
        if before is None:
            # Where a disk does not answer in time, it may do so later; who is stopped or gone does nothing.
            view.excuse = WORKS if view.process == UNINTERRUPTIBLE else ""
            return view
        view.stacks = read_stacks(self.stacks_file, before)
        frames = main_frames(view.stacks, self._thread)
        view.frames, view.at = tuple(map(str, frames)), place_of(frames)
        _note_wait(view, frames)
        view.excuse = excuse_of(frames, frames_of(view.stacks))
        if view.excuse in ("", WORKS):
            is_at_work = view.excuse or view.phase == SAVING or children_work or self._works()
            view.excuse = WORKS if is_at_work and not view.waits else ""
        return view

    def _works(self) -> bool:
        """Return whether its thread has computed for a part of the time since it did something last."""
        since, cpu_s = self._went_on
        return self._look.cpu_s - cpu_s > _WORKS * max(1.0, self._looked_at - since)

    def signal(self, number: int) -> None:
        with suppress(OSError):
            signal.pidfd_send_signal(self.process, number)


def takes_signal(pid: int) -> bool:
    """Return whether a process has a handler for `SIGNAL`, without which the signal would end it."""
    with suppress(OSError, ValueError, KeyError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        masks = dict(line.split(":\t") for line in status.splitlines() if line.startswith(("SigBlk", "SigCgt")))
        bit = 1 << (SIGNAL - 1)
        return bool(int(masks["SigCgt"], 16) & bit and not int(masks["SigBlk"], 16) & bit)
    return False


def wait_for_stacks(files: Mapping[int, int]) -> None:
    """Return once something was written to each file and no more comes, after 3 s in any case.

    Args:
        files: descriptors, and how many bytes each had before.
    """
    deadline, sizes = time.monotonic() + _WRITTEN_S, dict(files)
    while files and time.monotonic() < deadline:
        time.sleep(_SETTLED_S)
        now = {file: os.fstat(file).st_size for file in files}
        if now == sizes and all(now[file] > before for file, before in files.items()):
            return
        sizes = now


def read_stacks(file: int, before: int) -> str:
    """Return what was written to the file since it had `before` bytes."""
    return os.pread(file, _MOST_BYTES, before).decode(errors="replace")


def excuse_of(frames: Sequence[Frame], all_frames: Sequence[Frame]) -> str:
    """Return why a rank may be without progress, by its stacks: "debugger", "compiles", `WORKS`; "" if none tells.

    Args:
        frames: of the main thread.
        all_frames: of all threads: of a backward pass on a GPU, it is autograd's thread that compiles.
    """
    if has_called(_DEBUGGER, frames):
        return "debugger"
    if has_called(_COMPILER, all_frames):
        return "compiles"
    return WORKS if has_called(_SAVES, frames) or is_in_backward(frames) else ""


def _note_wait(view: View, frames: Sequence[Frame]) -> None:
    """Note what a rank waits in that it has not noted itself: by the flight recorder, else by its stack."""
    is_recorded = view.enqueued > 0 and time.monotonic() - view.read_at < _FRESH_S
    if is_recorded and view.pending and view.state != State.FAILED:
        # It has not changed since the job's last progress, as its counters are progress.
        view.state, view.what, view.elements = State.WAITING, view.pending, view.pending_elements
        view.is_counted, view.is_recorded = False, True
    elif view.state == State.BETWEEN:
        # Where no collective waits, the main thread waits for a thread of autograd's, and that one for nobody else.
        is_alone = is_recorded or view.cpu > _WAITS
        if (what := collective_of(frames)) and not (is_alone and is_in_backward(frames)):
            view.state, view.what = State.WAITING, what


class LocalRanks:
    """All ranks of this host that can be looked at.

    Args:
        records: by the rank, where its process has its heartbeat.
    """

    def __init__(self, records: Mapping[int, str]) -> None:
        self.by_rank: dict[int, LocalRank] = {}
        self.problems: dict[int, str] = {}
        """Why a rank cannot be looked at."""
        for rank, record in records.items():
            try:
                self.by_rank[rank] = LocalRank(rank, record)
            except (OSError, ValueError) as error:
                self.problems[rank] = getattr(error, "strerror", "") or str(error)

    @property
    def are_gone(self) -> bool:
        return not self.running

    @property
    def running(self) -> list[int]:
        """Descriptors that become readable when a rank ends."""
        return [rank.process for rank in self.by_rank.values() if not rank.is_gone]

    def views(self) -> dict[int, View]:
        """Return what each rank does now."""
        return {number: rank.view() for number, rank in self.by_rank.items()}

    def views_with_stacks(self) -> dict[int, View]:
        """Return what each rank does now, and its stacks. Takes up to 3 s."""
        began = time.monotonic()
        computed = {number: children_cpu_s(rank.pid) for number, rank in self.by_rank.items()}
        asked = {number: rank.ask() for number, rank in self.by_rank.items()}
        wait_for_stacks({self.by_rank[number].stacks_file: size for number, size in asked.items() if size is not None})
        enough = _WORKS * max(0.1, time.monotonic() - began)
        return {
            number: rank.with_stacks(asked[number], children_work=children_cpu_s(rank.pid) - computed[number] > enough)
            for number, rank in self.by_rank.items()
        }

    def end(self) -> None:
        """End all ranks."""
        for number, wait_s in ((signal.SIGTERM, _TERMINATED_S), (signal.SIGKILL, 0.0)):
            for rank in self.by_rank.values():
                rank.signal(number)
            deadline = time.monotonic() + wait_s
            while not self.are_gone and time.monotonic() < deadline:
                select.select(self.running, [], [], 0.1)

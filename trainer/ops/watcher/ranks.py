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

from trainer.cluster.output import warn
from trainer.cluster.processes import GONE, look
from trainer.ops.watcher.job import Doing, View
from trainer.watch.heartbeat import SIGNAL, SIZE, State
from trainer.watch.stack import Frame, collective_of, has_called, is_in_backward, main_frames, place_of

_COMPUTES = 0.2
"""In a backward pass, a rank that takes more than this share of a processor computes, and does not wait for others."""
_FRESH_S = 2.0
"""How long a reading of the flight recorder counts; there are four a second."""
_WRITTEN_S, _SETTLED_S = 3.0, 0.15
_MOST_BYTES = 256 * 1024
_TERMINATED_S = 3.0
_DEBUGGER = re.compile(r"/(pdb|bdb)\.py$|/(pydevd|debugpy|_pydevd_bundle|ipdb|pudb)(/|\.py$)")
_BY_STATE = {State.WAITING: Doing.WAITS, State.LOADER: Doing.LOADS, State.FAILED: Doing.FAILED}
_BY_PROCESS = {"T": Doing.STOPPED, "t": Doing.DEBUGS, GONE: Doing.GONE}
"""By the kernel's letter for the thread that trains."""


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
        self._stacks_file = os.open(f"/proc/{self.pid}/fd/{heartbeat.stacks_file}", os.O_RDONLY)
        self._asked: tuple[int, float, float] | None = None
        """Once it was asked for its stacks: the size of their file, the time, and its processor time before."""

    @property
    def is_gone(self) -> bool:
        return bool(select.select([self.process], [], [], 0)[0])

    def _read(self) -> bytes:
        return self._record[:]

    def view(self) -> View:
        """Return what it does now."""
        view = View.from_reader(self._read)
        assert view is not None  # noqa: S101 (it was one, and its head never changes)
        process = GONE if self.is_gone else look(self.pid, thread=self._native_thread).state
        if view.is_at_end and (process == GONE or view.state != State.WAITING):
            view.doing = Doing.ENDED
        else:
            view.doing = _BY_PROCESS.get(process) or _BY_STATE.get(view.state, Doing.RUNS)
        return view

    def ask(self) -> None:
        """Have it write its stacks, unless it cannot."""
        process, self._asked = look(self.pid, thread=self._native_thread), None
        if process.state not in _BY_PROCESS and takes_signal(self.pid):
            self._asked = (os.fstat(self._stacks_file).st_size, time.monotonic(), process.cpu_s)
            self.signal(SIGNAL)

    @property
    def has_answered(self) -> bool:
        """Whether it has written stacks, unless it was not asked."""
        return self._asked is None or os.fstat(self._stacks_file).st_size > self._asked[0]

    def with_stacks(self) -> View:
        """Return what it does now, by the stacks that it was asked for and has written."""
        view = self.view()
        if self._asked is not None and view.doing not in _BY_PROCESS.values():
            size, asked_at, cpu_s = self._asked
            view.stacks = os.pread(self._stacks_file, _MOST_BYTES, size).decode(errors="replace")
            frames = main_frames(view.stacks, self._thread)
            view.frames, view.at = tuple(map(str, frames)), place_of(frames)
            cpu_s = look(self.pid, thread=self._native_thread).cpu_s - cpu_s
            _apply_stack(view, frames, computes=cpu_s > _COMPUTES * (time.monotonic() - asked_at))
        return view

    def signal(self, number: int) -> None:
        with suppress(OSError):
            signal.pidfd_send_signal(self.process, number)


def _apply_stack(view: View, frames: Sequence[Frame], *, computes: bool) -> None:
    """Note in a view what its stack, or the flight recorder, tells of what the rank does.

    Args:
        frames: of the thread that trains.
        computes: whether that thread does now.
    """
    is_recorded = view.enqueued > 0 and time.monotonic() - view.read_at < _FRESH_S
    # Where no collective waits, the main thread waits for a thread of autograd's, which waits for nobody else.
    is_alone = is_in_backward(frames) and (is_recorded or computes)
    if has_called(_DEBUGGER, frames):
        view.doing = Doing.DEBUGS
    elif is_recorded and view.pending and view.doing in (Doing.RUNS, Doing.LOADS, Doing.WAITS):
        view.doing, view.what, view.is_recorded = Doing.WAITS, view.pending, True
    elif view.doing is Doing.RUNS and (what := collective_of(frames)) and not is_alone:
        view.doing, view.what = Doing.WAITS, what


def takes_signal(pid: int) -> bool:
    """Return whether a process has a handler for `SIGNAL`, without which the signal would end it."""
    with suppress(OSError, ValueError, KeyError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        masks = dict(line.split(":\t") for line in status.splitlines() if line.startswith(("SigBlk", "SigCgt")))
        bit = 1 << (SIGNAL - 1)
        return bool(int(masks["SigCgt"], 16) & bit and not int(masks["SigBlk"], 16) & bit)
    return False


class LocalRanks:
    """All ranks of this host that can be looked at.

    Args:
        records: by the rank, where its process has its heartbeat.
    """

    def __init__(self, records: Mapping[int, str]) -> None:
        self.by_rank: dict[int, LocalRank] = {}
        for rank, record in records.items():
            try:
                self.by_rank[rank] = LocalRank(rank, record)
            except (OSError, ValueError) as error:
                warn(f"hangs are not watched for on rank {rank}: {getattr(error, 'strerror', '') or error}")

    @property
    def running(self) -> list[int]:
        """Descriptors that become readable when a rank ends."""
        return [rank.process for rank in self.by_rank.values() if not rank.is_gone]

    def views(self) -> dict[int, View]:
        """Return what each rank does now."""
        return {number: rank.view() for number, rank in self.by_rank.items()}

    def views_with_stacks(self) -> dict[int, View]:
        """Return what each rank does now, and its stacks. Takes up to 3 s."""
        ranks = self.by_rank.values()
        for rank in ranks:
            rank.ask()
        deadline = time.monotonic() + _WRITTEN_S
        time.sleep(_SETTLED_S)
        while not all(rank.has_answered for rank in ranks) and time.monotonic() < deadline:
            time.sleep(_SETTLED_S)
        time.sleep(_SETTLED_S)  # for the rest of what they write
        return {number: rank.with_stacks() for number, rank in self.by_rank.items()}

    def end(self) -> None:
        """End all ranks."""
        for number, wait_s in ((signal.SIGTERM, _TERMINATED_S), (signal.SIGKILL, 0.0)):
            for rank in self.by_rank.values():
                rank.signal(number)
            deadline = time.monotonic() + wait_s
            while self.running and time.monotonic() < deadline:
                select.select(self.running, [], [], 0.1)

"""The ranks of one host, as its watcher sees them: their heartbeats, their processes, their stacks, and their end."""

from __future__ import annotations

import mmap
import os
import select
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

from trainer.cluster.processes import GONE, Process, children_cpu_s, look
from trainer.watch.heartbeat import SAVING, SIZE, Recorded, State, read_heartbeat
from trainer.watch.job_folder import DIFFERENT, HANG, write_verdict
from trainer.watch.judge import WORKS, View
from trainer.watch.probe import (
    STOPPED,
    UNINTERRUPTIBLE,
    Frame,
    all_frames,
    ask_for_stacks,
    compiles,
    is_debugged,
    is_in_backward,
    main_frames,
    place_of,
    read_stacks,
    saves,
    wait_for_stacks,
    waits_in,
)

_LOOK_S = 1.0
_WORKS = 0.1
"""Share of a processor with which a thread or the children of a rank are at work, also on a busy host."""
_FRESH_S = 2.0
"""What the flight recorder has said is old after eight readings that did not come."""
_TERMINATED_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a rank's process is found on its host."""

    rank: int
    pid: int
    started: int
    """See `Process.started`."""
    heartbeat: int
    """Its descriptor of the record of `trainer.watch.heartbeat`."""
    stacks: int
    """Its descriptor of the file that it writes its stacks to."""
    thread: int = 0
    """The thread that trains, by the system's number; 0 is the main thread."""

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class LocalRank:
    """One rank.

    Raises:
        OSError: this process may not look at it, or it is gone.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        descriptor = os.open(f"/proc/{address.pid}/fd/{address.heartbeat}", os.O_RDONLY)
        try:
            self._record = mmap.mmap(descriptor, SIZE, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        heartbeat = self._read()
        if heartbeat is None or (heartbeat.pid, heartbeat.rank) != (address.pid, address.rank):
            raise OSError("its heartbeat is another process's")
        self._thread = heartbeat.thread
        self._stacks = os.open(f"/proc/{address.pid}/fd/{address.stacks}", os.O_RDONLY)
        self.process = os.pidfd_open(address.pid)
        self._looked_at, self._look, self._cpu = 0.0, Process("S", 0, 0.0), 0.0
        self._state, self._recorded = "S", Recorded()
        self._last: tuple[int, ...] = ()
        self._went_on = (0.0, 0.0)
        """When it did something last, and its thread's processor time then."""
        self._children_at, self._children_s, self._children_work = 0.0, 0.0, False

    @property
    def is_gone(self) -> bool:
        return bool(select.select([self.process], [], [], 0)[0])

    def _read(self) -> View | None:
        return read_heartbeat(View, lambda: self._record[:])

    def view(self) -> View:
        """Return what it does now."""
        self._look_again(time.monotonic())
        view = self._read()
        assert view is not None  # noqa: S101 (it was one, and its head never changes)
        self._recorded = Recorded.from_buffer_copy(view.recorded)
        view.group, view.number, view.steps_before = "", 0, 0
        view.process, view.cpu = GONE if self.is_gone else self._state, self._cpu
        if view.counters != self._last:
            self._last, self._went_on = view.counters, (self._looked_at, self._look.cpu_s)
        return view

    def _look_again(self, now: float) -> None:
        if (passed := now - self._looked_at) < _LOOK_S:
            return
        process, before = look(self.address.pid, self.address.started, self.address.thread), self._look
        self._cpu = min(1.0, (process.cpu_s - before.cpu_s) / passed) if self._looked_at else 0.0
        # A healthy process is in uninterruptible sleep for moments.
        is_moment = process.state == UNINTERRUPTIBLE and before.state != UNINTERRUPTIBLE
        self._state, self._look, self._looked_at = "S" if is_moment else process.state, process, now

    def note_children(self) -> None:
        """Begin to measure what its children compute."""
        self._children_at, self._children_s = time.monotonic(), children_cpu_s(self.address.pid)

    def compare_children(self) -> None:
        """Find out whether its children have computed since `note_children`."""
        passed = max(0.1, time.monotonic() - self._children_at)
        self._children_work = children_cpu_s(self.address.pid) - self._children_s > _WORKS * passed

    def ask(self) -> int | None:
        """Have it write its stacks; return how much was in the file before, or None where it cannot."""
        if self.view().process in (GONE, STOPPED, UNINTERRUPTIBLE):
            return None
        before = os.fstat(self._stacks).st_size
        return before if ask_for_stacks(self.address.pid) else None

    @property
    def file(self) -> int:
        """The descriptor of its stacks."""
        return self._stacks

    def with_stacks(self, before: int | None) -> View:
        """Return what it does now, with the stacks that it was asked for and has written."""
        view = self.view()
        if before is None:
            # Where a disk does not answer in time, it may do so later; who is stopped or gone does nothing.
            return view.replaced(excuse=WORKS if view.process == UNINTERRUPTIBLE else "")
        stacks = read_stacks(self._stacks, before)
        frames = main_frames(stacks, self._thread)
        view = view.replaced(stacks=stacks, frames=tuple(map(str, frames)), at=place_of(frames))
        view = self._with_wait(view, frames)
        if is_debugged(frames):
            return view.replaced(excuse="debugger")
        if compiles(all_frames(stacks)):  # of a backward pass on a GPU, autograd's thread does
            return view.replaced(excuse="compiles")
        is_at_work = view.phase == SAVING or saves(frames) or is_in_backward(frames)
        is_at_work = is_at_work or self._works() or self._children_work
        return view.replaced(excuse=WORKS if is_at_work and not view.waits else "")

    def _with_wait(self, view: View, frames: list[Frame]) -> View:
        """Return what it waits in that it has not noted: by the flight recorder, else by its stack."""
        recorded = self._recorded
        is_known = recorded.enqueued > 0 and time.monotonic() - recorded.read_at < _FRESH_S
        if is_known and recorded.pending and view.state != State.FAILED:
            # It has not changed since the job's last progress, as its counters are progress.
            return view.replaced(
                state=State.WAITING,
                what=recorded.pending,
                elements=recorded.pending_elements,
                is_counted=False,
                group=recorded.group,
                number=recorded.number,
                steps_before=recorded.steps_before,
            )
        if view.state == State.BETWEEN and (what := waits_in(frames, view.cpu, is_recorded=is_known)):
            return view.replaced(state=State.WAITING, what=what)
        return view

    def _works(self) -> bool:
        """Return whether its thread has computed since it did something last, other work beside it or not."""
        since, cpu_s = self._went_on
        return self._look.cpu_s - cpu_s > _WORKS * max(1.0, self._looked_at - since)

    def signal(self, number: int) -> None:
        with suppress(OSError):
            signal.pidfd_send_signal(self.process, number)


class LocalRanks:
    """All ranks of this host that can be looked at."""

    def __init__(self, addresses: Mapping[int, Address]) -> None:
        self.by_rank: dict[int, LocalRank] = {}
        self.problems: dict[int, str] = {}
        """Why a rank cannot be looked at."""
        for rank, address in addresses.items():
            try:
                self.by_rank[rank] = LocalRank(address)
            except OSError as error:
                self.problems[rank] = error.strerror or str(error)

    @property
    def are_gone(self) -> bool:
        return all(rank.is_gone for rank in self.by_rank.values())

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
            rank.note_children()
        asked = {number: rank.ask() for number, rank in self.by_rank.items()}
        wait_for_stacks({self.by_rank[number].file: size for number, size in asked.items() if size is not None})
        for rank in ranks:
            rank.compare_children()
        return {number: rank.with_stacks(asked[number]) for number, rank in self.by_rank.items()}

    def note_why(self, said: str) -> None:
        """Note why the job has failed where `trainer run` finds it."""
        write_verdict(DIFFERENT, said)

    def end(self, said: str, culprits: tuple[int, ...]) -> None:
        """End all ranks, and note why where `trainer run` finds it."""
        write_verdict(HANG, said, culprits)
        for number, wait_s in ((signal.SIGTERM, _TERMINATED_S), (signal.SIGKILL, 0.0)):
            for rank in self.by_rank.values():
                rank.signal(number)
            deadline = time.monotonic() + wait_s
            while not self.are_gone and time.monotonic() < deadline:
                select.select(self.running, [], [], 0.1)


def own_address(rank: int, heartbeat: int, stacks: int) -> Address:
    """Return where this process is found."""
    pid = os.getpid()
    started, thread = look(pid).started, threading.get_native_id()
    return Address(rank=rank, pid=pid, started=started, heartbeat=heartbeat, stacks=stacks, thread=thread)

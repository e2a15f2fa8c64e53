"""The ranks of one host, as its watcher sees them: their marks, a look from outside, their stacks, and their end."""

from __future__ import annotations

import mmap
import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainer.hang.looks import (
    GONE,
    SIGNAL,
    STOPPED,
    UNINTERRUPTIBLE,
    Frame,
    Process,
    ask_for_stacks,
    collect_stacks,
    compiles,
    is_debugged,
    look,
    main_frames,
    saves,
    waits_in,
)
from trainer.hang.views import WORKS, View
from trainer.launch.marks import SIZE, State, read_mark
from trainer.launch.status import report_hang

_LOOK_S = 1.0
_TERMINATED_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a rank's process is found on its host."""

    rank: int
    pid: int
    started: int
    """See `Process.started`."""
    marks: int
    """Its descriptor of the record of `trainer.launch.marks`."""
    stacks: int
    """Its descriptor of the file that it writes its stacks to."""

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class LocalRank:
    """One rank.

    Raises:
        OSError: this process may not look at it, or it is gone.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        descriptor = os.open(f"/proc/{address.pid}/fd/{address.marks}", os.O_RDONLY)
        try:
            self._marks = mmap.mmap(descriptor, SIZE, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        mark = read_mark(self._marks[:])
        if mark is None or (mark.pid, mark.rank) != (address.pid, address.rank):
            raise OSError("its marks are another process's")
        self._stacks = os.open(f"/proc/{address.pid}/fd/{address.stacks}", os.O_RDONLY)
        self.process = os.pidfd_open(address.pid)
        self._looked_at, self._look, self._cpu = 0.0, Process("S", 0, 0.0), 0.0
        self._state = "S"

    @property
    def is_gone(self) -> bool:
        return bool(select.select([self.process], [], [], 0)[0])

    def view(self) -> View:
        """Return what it does now."""
        self._look_again(time.monotonic())
        mark = read_mark(self._marks[:])
        assert mark is not None  # noqa: S101 (it was one, and its head never changes)
        return View(
            rank=mark.rank, state=int(mark.state), what=mark.what, collectives=mark.collectives, steps=mark.steps,
            elements=mark.elements, updates=mark.updates, events=mark.events, progress=mark.progress, phase=mark.phase,
            folder=mark.folder, process=GONE if self.is_gone else self._state, cpu=self._cpu,
        )  # fmt: skip

    def _look_again(self, now: float) -> None:
        if (passed := now - self._looked_at) < _LOOK_S:
            return
        found, before = look(self.address.pid, self.address.started), self._look
        self._cpu = min(1.0, (found.cpu_s - before.cpu_s) / passed) if self._looked_at else 0.0
        # A healthy process is in uninterruptible sleep for moments.
        is_moment = found.state == UNINTERRUPTIBLE and before.state != UNINTERRUPTIBLE
        self._state, self._look, self._looked_at = "S" if is_moment else found.state, found, now

    def ask(self) -> int | None:
        """Have it write its stacks; return how much was in the file before, or None where it cannot."""
        if self.view().process in (GONE, STOPPED, UNINTERRUPTIBLE):
            return None
        before = os.fstat(self._stacks).st_size
        return before if ask_for_stacks(self.address.pid) else None

    def with_stacks(self, before: int | None) -> View:
        """Return what it does now, with the stacks that it was asked for."""
        view = self.view()
        if before is None:
            return view
        stacks = collect_stacks(self._stacks, before)
        mark = read_mark(self._marks[:])
        frames = main_frames(stacks, mark.thread if mark else 0)
        view = replace(view, stacks=stacks, frames=tuple(map(str, frames)))
        if view.state == State.BETWEEN and (what := waits_in(frames, view.cpu)):
            view = replace(view, state=int(State.WAITING), what=what)
        return replace(view, excuse=_excuse(view, frames))

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
        asked = {number: rank.ask() for number, rank in self.by_rank.items()}
        return {number: rank.with_stacks(asked[number]) for number, rank in self.by_rank.items()}

    def end(self, said: str, culprits: tuple[int, ...]) -> None:
        """End all ranks, and note why where `trainer run` finds it."""
        message = f"{','.join(map(str, culprits))}: {said}"
        for number, wait_s in ((signal.SIGTERM, _TERMINATED_S), (signal.SIGKILL, 0.0)):
            for rank in self.by_rank:
                report_hang(rank, message)
            for one in self.by_rank.values():
                one.signal(number)
            deadline = time.monotonic() + wait_s
            while not self.are_gone and time.monotonic() < deadline:
                select.select(self.running, [], [], 0.1)


def _excuse(view: View, frames: list[Frame]) -> str:
    if is_debugged(frames):
        return "debugger"
    if compiles(frames):
        return "compiles"
    is_at_work = view.state == State.BETWEEN and (view.cpu > 0.5 or saves(frames))
    return WORKS if is_at_work else ""


def own_address(rank: int, marks: int, stacks: int) -> Address:
    """Return where this process is found."""
    pid = os.getpid()
    return Address(rank=rank, pid=pid, started=look(pid).started, marks=marks, stacks=stacks)


def address_from(fields: Mapping[str, Any]) -> Address:
    """Return the address that `as_dict` has described."""
    return Address(**fields)


__all__ = ["SIGNAL", "Address", "LocalRank", "LocalRanks", "address_from", "own_address"]

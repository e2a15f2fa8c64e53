"""The ranks of an attempt while it runs: their heartbeats, which of them are dead, and whether any makes progress."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainer.cluster.output import say
from trainer.cluster.processes import is_running
from trainer.ops.supervise.hosts import Host
from trainer.ops.supervise.remote import Inquiry
from trainer.watch.compare import compare
from trainer.watch.heartbeat import DONE, PREEMPTED, Heartbeat
from trainer.watch.job_folder import WAITS, folder_name, is_ours

_POLL_S = 5.0
"""How often other hosts are asked."""
_SUSPICIOUS_S = 15.0
"""After this time without progress, other hosts are asked whether they are there."""
_LOST = 2
"""A host is lost when it does not answer this many times in a row."""


class Ranks:
    """The ranks of a job. Those of this host are read from the files of their heartbeats.

    Other hosts are asked through ssh: for the heartbeats of their ranks if this host has no ranks (else those of this
    host are enough, because all ranks take their updates together), and, once progress stops, whether they still
    answer, because nothing else tells of a host without power.
    """

    def __init__(self, hosts: Sequence[Host], job: str, timeout_s: float) -> None:
        self.all: dict[int, Heartbeat] = {}
        self.host_of: dict[int, str] = {}
        self.dead: tuple[int, ...] = ()
        """Ranks of this host whose processes were found gone first, without an orderly end."""
        self.ended: tuple[int, ...] = ()
        """Ranks that had ended in good order when the first was found dead."""
        self.killed: frozenset[int] = frozenset()
        """Ranks of this host that ran until `kill` was called."""
        self.lost: set[str] = set()
        """Hosts that have stopped answering."""
        self.joined_at: float | None = None
        self.first_update_at: float | None = None
        self._here = next((host.name for host in hosts if host.is_here), "")
        self._hosts, self._timeout_s = hosts, timeout_s
        self._folder = Path(tempfile.gettempdir(), folder_name(job, os.geteuid()))
        self.progress_at = time.monotonic()
        """Time of the most recent progress of any rank, on this host's monotonic clock."""
        self._descriptors: dict[int, int] = {}
        self._gone: set[int] = set()
        self._unanswered, self._waits = Counter[str](), Counter[str]()
        self._inquiry = Inquiry(hosts, job, _POLL_S)

    def close(self) -> None:
        """Close the descriptors of the processes, and ask other hosts no more."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._inquiry.close()

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that become readable when a rank of this host ends."""
        return list(self._descriptors.values())

    @property
    def idle_s(self) -> float | None:
        """Seconds without any progress, once that is longer than the timeout."""
        idle = time.monotonic() - self.progress_at
        working = [rank for rank in self.all.values() if rank.phase not in (PREEMPTED, DONE)]
        return idle if working and 0 < self._timeout_s < idle else None

    @property
    def updates(self) -> tuple[int, int] | None:
        """The first and the last completed update."""
        counted = [rank for rank in self.all.values() if rank.first_update]
        return (min(rank.first_update for rank in counted), max(rank.updates for rank in counted)) if counted else None

    def kill(self) -> None:
        """Kill the ranks of this host."""
        self.killed = frozenset(self._descriptors)
        for descriptor in self._descriptors.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    def read(self) -> None:
        """Read the heartbeats of the ranks, look for dead ranks, and ask other hosts if it is time to."""
        if self._here:
            with suppress(OSError):
                for path in self._folder.glob("rank-*") if is_ours(self._folder) else ():
                    if (heartbeat := Heartbeat.from_reader(path.read_bytes)) is not None:
                        self.note(self._here, heartbeat)
            self._look_for_dead()
        is_idle = bool(self.all) and time.monotonic() - self.progress_at > _SUSPICIOUS_S
        if not self._here or (is_idle and len(self._hosts) > 1):
            self._ask()

    def note(self, host: str, heartbeat: Heartbeat) -> None:
        """Take in what a rank has reported."""
        known = self.all.get(heartbeat.rank)
        self.all[heartbeat.rank] = heartbeat
        self.host_of[heartbeat.rank] = host
        now = time.monotonic()
        if known is None or known.progress_s != heartbeat.progress_s:
            # Clocks of other hosts begin elsewhere.
            self.progress_at = max(self.progress_at, heartbeat.progress_s if host == self._here else now)
        if heartbeat.phase != "joining" and self.joined_at is None:
            self.joined_at = now
        if heartbeat.first_update_s and self.first_update_at is None:
            self.first_update_at = heartbeat.first_update_s if host == self._here else now

    def _look_for_dead(self) -> None:
        running = {number: rank.pid for number, rank in self.all.items() if number not in self._gone}
        for number in running.keys() - self._descriptors.keys():
            with suppress(OSError, AttributeError):  # it is gone, or the system has no such descriptors
                self._descriptors[number] = os.pidfd_open(running[number])
        dead = {number for number, process in running.items() if not is_running(process)}
        for number in dead & self._descriptors.keys():
            os.close(self._descriptors.pop(number))
        self._gone |= dead
        silent = [number for number in dead if self.all[number].phase not in (DONE, PREEMPTED)]
        if silent and not self.dead:
            self.dead, self.ended = tuple(sorted(silent)), tuple(sorted(self._gone - set(silent)))

    def _ask(self) -> None:
        answers = self._inquiry.answers()
        for answer in answers:
            self._unanswered[answer.host] = 0 if answer.is_well else self._unanswered[answer.host] + 1
            for heartbeat in answer.ranks:
                self.note(answer.host, heartbeat)
        self.lost = {host for host, times in self._unanswered.items() if times >= _LOST}
        waits = compare({answer.host: answer.verdict for answer in answers})
        if waits is not None and waits.kind == WAITS:
            # Twice, because the hosts' watchers do not note it at the same moment.
            self._waits[waits.text] += 1
            if self._waits[waits.text] == _LOST:
                say([waits.text])

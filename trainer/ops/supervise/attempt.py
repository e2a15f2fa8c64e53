"""One start of the job: it is launched, watched, and ended on every host."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from trainer.ops.supervise.hosts import Host
from trainer.ops.supervise.launchers import launch, program_of
from trainer.ops.supervise.outcome import Facts, Judgement, Verdict, judge
from trainer.ops.supervise.remote import Answer, on_all_hosts
from trainer.ops.supervise.signals import Signals
from trainer.ops.supervise.watch import Ranks
from trainer.watch.job_folder import HANG

_TICK_S = 0.25
_LAUNCHER_ENDS_S = 0.5
"""Time for a launcher to note which rank has died, before the others are killed, which can save nothing any more.

Left to the launcher, ranks with checkpoints would take its SIGTERM for a request to save, and wait for the dead one.
"""
_TERMINATED_S = 2.0
_INTERRUPTED_S = 5.0
"""Time for a launcher to end after a signal, before everything is killed."""
_INTERRUPTED = Judgement(Verdict.INTERRUPTED, "interrupted", is_last=True)


@dataclass
class Times:
    """Moments of an attempt, by this host's monotonic clock; None for what has not happened."""

    started: float
    joined: float | None = None
    first_update: float | None = None
    progress: float | None = None
    """When the last rank reported last."""
    detected: float | None = None
    ended: float | None = None
    """When no process of it was left."""


@dataclass
class Attempt:
    """A start of the job on these hosts, and how it went."""

    hosts: Sequence[Host]
    job: str
    times: Times
    wall_clock: float
    judgement: Judgement = field(default=_INTERRUPTED)
    updates: tuple[int, int] | None = None
    """The first and the last completed update."""


class Running:
    """An attempt that is under way.

    Args:
        all_hosts: are all asked afterwards whether they are well, those of this attempt among them.
        on_tick: called now and then; returns a reason for which the ranks shall save and be started again, or "".
    """

    def __init__(
        self, attempt: Attempt, all_hosts: Sequence[Host], launcher: str, timeout_s: float, signals: Signals,
        on_tick: Callable[[], str],
    ) -> None:  # fmt: skip
        self._attempt, self._all_hosts, self._launcher = attempt, all_hosts, launcher
        self._signals, self._on_tick = signals, on_tick
        self._ranks = Ranks(attempt.hosts, attempt.job, timeout_s)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._asked_for, self._is_last = "", False
        self._idle_s: float | None = None

    def run(self, command: Sequence[str]) -> list[Answer]:
        """Start the job, wait for its end, and end what is left; return what the hosts have answered."""
        try:
            self._processes = launch(self._launcher, self._attempt.hosts, command, self._attempt.job)
            self._watch()
            codes = self._codes()
            self._attempt.times.detected = self._attempt.times.detected or time.monotonic()
            if self._end():
                codes = self._codes()
        finally:
            self._ranks.close()
            answers = on_all_hosts(self._all_hosts, self._attempt.job, "kill")
            for process in self._processes:
                process.kill()
                process.wait()
        self._attempt.times.ended = time.monotonic()
        self._conclude(answers, codes)
        return answers

    @property
    def _is_over(self) -> bool:
        # One agent of several that fails ends the job; so does the end of all.
        codes = [process.poll() for process in self._processes]
        return None not in codes or any(codes)

    def _watch(self) -> None:
        deadline = None
        while not self._is_over and not self._signals.interrupted_by:
            self._signals.wait(_TICK_S, self._ranks.descriptors)
            self._ranks.read()
            self._ask()
            now = time.monotonic()
            if self._ranks.dead and deadline is None:
                self._attempt.times.detected, deadline = now, now + _LAUNCHER_ENDS_S
            self._idle_s = self._ranks.idle_s
            if self._idle_s is not None or self._ranks.lost or (deadline is not None and now >= deadline):
                return
        self._ranks.read()

    def _ask(self) -> None:
        """Ask the ranks to save and end, where somebody wants that; where none has joined, there is nothing to save."""
        if self._signals.preempts and not self._is_last:
            self._asked_for, self._is_last = "preempted", True
        # Before the first update there is nothing to save, and a job that starts slowly would never get there.
        elif not self._asked_for and self._ranks.updates and (reason := self._on_tick()):
            self._asked_for = reason
        else:
            return
        on_all_hosts(self._attempt.hosts, self._attempt.job, "preempt")
        if not self._ranks.all:
            self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _codes(self) -> list[int]:
        return [code for process in self._processes if (code := process.poll()) is not None]

    def _end(self) -> bool:
        """Have the launcher end what it has started, and remove its files; return whether that was up to itself."""
        if self._signals.interrupted_by:
            # A terminal's Ctrl-C has reached the launcher as well, and mpirun takes a second one for impatience.
            self._wait(_INTERRUPTED_S / 2)
            self._signal(signal.SIGTERM)
            self._wait(_INTERRUPTED_S)
            return False
        by_itself = bool(self._ranks.dead)
        if not by_itself:  # else it ends the job already, and mpirun crashes on a signal meanwhile
            self._signal(signal.SIGTERM)
        self._ranks.kill()
        self._wait(_TERMINATED_S)
        return by_itself

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _conclude(self, answers: Sequence[Answer], codes: Sequence[int]) -> None:
        attempt, ranks = self._attempt, self._ranks
        names, here = {host.name for host in attempt.hosts}, {host.name for host in attempt.hosts if host.is_here}
        gone = set[int]()
        # A host that is back without being in this attempt may still have the files of an earlier one.
        for answer in (answer for answer in answers if answer.host in names):
            for heartbeat in answer.ranks:
                ranks.note(answer.host, heartbeat)
                is_killed = answer.host in here and heartbeat.rank in ranks.killed
                if heartbeat.pid not in answer.processes and not (heartbeat.has_ended or is_killed):
                    gone.add(heartbeat.rank)
        asked = {number for number, heartbeat in ranks.all.items() if heartbeat.signal}
        # One that has said why it ends may have been seen first, because those that are left take their time.
        silent = [number for number in ranks.dead if not ranks.all[number].has_ended]
        dead = find_dead(silent, gone, asked, ranks.host_of)
        lost = {answer.host: answer.problem for answer in answers if not answer.is_well and answer.host in names}
        verdicts = [answer.verdict for answer in answers if answer.verdict is not None and answer.host in names]
        facts = Facts(
            launcher=program_of(self._launcher), codes=codes, ranks=ranks.all, host_of=ranks.host_of, dead=dead,
            ended=ranks.ended, lost=lost, idle_s=self._idle_s, asked_for=self._asked_for, is_last=self._is_last,
            was_interrupted=self._signals.interrupted_by is not None,
            verdict=next((verdict for verdict in verdicts if verdict.kind == HANG), next(iter(verdicts), None)),
        )  # fmt: skip
        attempt.judgement = judge(facts)
        attempt.times.joined, attempt.times.first_update = ranks.joined_at, ranks.first_update_at
        # A rank may do a little more after another has died.
        attempt.times.progress = min(ranks.progress_at, attempt.times.detected or ranks.progress_at)
        attempt.updates = ranks.updates


def find_dead(
    seen: Sequence[int], gone: Collection[int], asked: Collection[int], host_of: Mapping[int, str]
) -> Sequence[int]:
    """Return the ranks that died first; none where that is not known.

    Args:
        seen: ranks of this host whose deaths were seen first.
        gone: ranks of any host that were gone at the end, without a word.
        asked: ranks that had got a signal to end. A launcher sends it to those that a dead rank leaves behind.
    """
    if asked and (unasked := sorted(set(gone) - set(asked))):
        return unasked
    if len(gone) < len(host_of):
        return seen or sorted(gone)
    # The launcher has ended those that were left. All that died at once here may be among them.
    here = {number for number, host in host_of.items() if host in {host_of[number] for number in seen}}
    return seen if set(seen) < here or len(here) == len(host_of) else ()

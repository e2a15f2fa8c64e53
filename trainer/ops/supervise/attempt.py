"""Run an attempt: launch the job, watch its ranks, and end it on every host."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

from trainer.cluster.output import say
from trainer.cluster.processes import is_running
from trainer.ops.supervise.launchers import launch
from trainer.ops.supervise.options import Options
from trainer.ops.supervise.outcome import OURS, Attempt, judge
from trainer.ops.supervise.remote import Answer, on_all_hosts
from trainer.ops.supervise.signals import Signals
from trainer.ops.verdict import WAITS, compare
from trainer.watch.heartbeat import DONE, PREEMPTED, Heartbeat
from trainer.watch.job_folder import folder_name, is_ours

_POLL_S = 5.0
"""How often other hosts are asked."""
_IDLE_S = 600.0
"""The limit without `--timeout`, from the first heartbeat on."""
_SUSPICIOUS_S = 15.0
"""After this time without progress, other hosts are asked whether they are there."""
_LOST = 2
"""A host is lost when it does not answer this many times in a row."""
_LAUNCHER_ENDS_S = 0.5
"""Time for a launcher to note which rank has died, before the other ranks are killed; they cannot save any more.

If ending them were left to the launcher, ranks with checkpoints would take its SIGTERM for a request to save, and wait
for the dead rank.
"""
_TERMINATED_S = 2.0
_INTERRUPTED_S = 5.0
"""Time for a launcher to end after SIGTERM, or after Ctrl-C, before everything is killed."""


class Running:
    """An attempt that is under way.

    Ranks of this host are read from the files of their heartbeats. Other hosts are asked through ssh: for the
    heartbeats of their ranks if this host has no ranks (else those of this host are enough, because all ranks take
    their updates together), and, once progress stops, whether they still answer, because nothing else tells of a host
    without power.

    Args:
        attempt: gets what is seen of it.
        job: the id that marks its processes.
        signals: what may end it early.
    """

    def __init__(self, attempt: Attempt, job: str, options: Options, signals: Signals) -> None:
        self._attempt, self._job, self._options, self._signals = attempt, job, options, signals
        self._here = next((host.name for host in attempt.hosts if host.is_here), "")
        self._folder = Path(tempfile.gettempdir(), folder_name(job, os.geteuid()))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._gone: set[int] = set()
        self._killed: set[int] = set()
        self._asked_at = time.monotonic()
        self._unanswered, self._waits = Counter[str](), Counter[str]()

    def run(self) -> list[Answer]:
        """Start the job, wait for its end, end what is left, and judge it; return what all hosts have answered."""
        attempt = self._attempt
        try:
            made = on_all_hosts(attempt.hosts, self._job, "make")
            attempt.full = " ".join(f"{answer.host}: {answer.full}" for answer in made if answer.full)
            attempt.lost = {answer.host: answer.problem for answer in made if answer.problem}
            if not attempt.lost:
                self._processes = launch(self._options, attempt.hosts, self._job)
                self._watch()
            attempt.detected_at = attempt.detected_at or time.monotonic()
            self._end()
        finally:
            answers = on_all_hosts(self._options.hosts, self._job, "kill")
            for process in self._processes:
                process.kill()
                process.wait()
        attempt.ended_at = time.monotonic()
        self._conclude(answers)
        return answers

    def _watch(self) -> None:
        """Watch the ranks and the launcher until the job has ended, or has to be."""
        attempt, deadline = self._attempt, float("inf")
        while not self._is_over and not self._signals.interrupted_by:
            self._signals.tick()
            self.read()
            if self._signals.preempts and not attempt.is_preempted:
                attempt.is_preempted = True
                on_all_hosts(attempt.hosts, self._job, "preempt")
                if not attempt.ranks:  # then nothing can be saved yet
                    self._signal(signal.SIGTERM)
            if attempt.dead and attempt.detected_at is None:
                attempt.detected_at = time.monotonic()
                deadline = attempt.detected_at + _LAUNCHER_ENDS_S
            attempt.idle_s = self.idle_s
            if attempt.idle_s is not None or self.lost or time.monotonic() >= deadline:
                break
        else:
            self.read()
        self._note_codes()

    @property
    def _is_over(self) -> bool:
        # Of several agents, the failure of a single one ends the job; so does the end of all.
        codes = [process.poll() for process in self._processes]
        return None not in codes or any(codes)

    def _note_codes(self) -> None:
        codes = [code for process in self._processes if (code := process.poll()) is not None]
        self._attempt.codes = [code if code >= 0 else 128 - code for code in codes]

    @property
    def idle_s(self) -> float | None:
        """Seconds without any progress, since the launcher's start at first, once that is longer than the timeout."""
        idle, ranks = time.monotonic() - self._attempt.progress_at, self._attempt.ranks.values()
        given = self._options.timeout_s
        is_working = any(rank.phase not in (PREEMPTED, DONE) for rank in ranks) if ranks else given is not None
        return idle if is_working and 0 < (_IDLE_S if given is None else given) < idle else None

    @property
    def lost(self) -> set[str]:
        """Hosts that have stopped answering."""
        return {host for host, times in self._unanswered.items() if times >= _LOST}

    def read(self) -> None:
        """Read the heartbeats of the ranks, look for dead ranks, and ask other hosts if it is time to."""
        attempt = self._attempt
        if self._here:
            with suppress(OSError):
                for path in self._folder.glob("rank-*") if is_ours(self._folder) else ():
                    if (heartbeat := Heartbeat.from_reader(path.read_bytes)) is not None:
                        self.note(self._here, heartbeat)
            dead = self._ranks_here() - self._running()
            self._gone |= dead
            silent = [number for number in dead if attempt.ranks[number].phase not in (DONE, PREEMPTED)]
            if silent and not attempt.dead:
                attempt.dead, attempt.left = sorted(silent), sorted(self._gone - {*silent})
        now = time.monotonic()
        is_idle = bool(attempt.ranks) and now - attempt.progress_at > _SUSPICIOUS_S and len(attempt.hosts) > 1
        if (is_idle or not self._here) and now - self._asked_at > _POLL_S:
            self._ask()

    def _ranks_here(self) -> set[int]:
        return {number for number, host in self._attempt.host_of.items() if host == self._here} - self._gone

    def _running(self) -> set[int]:
        return {number for number in self._ranks_here() if is_running(self._attempt.ranks[number].pid)}

    def note(self, host: str, heartbeat: Heartbeat) -> None:
        """Take in what a rank has reported."""
        attempt, now = self._attempt, time.monotonic()
        known = attempt.ranks.get(heartbeat.rank)
        attempt.ranks[heartbeat.rank], attempt.host_of[heartbeat.rank] = heartbeat, host
        # Clocks of other hosts begin elsewhere.
        if known is None or known.progress_s != heartbeat.progress_s:
            attempt.progress_at = max(attempt.progress_at, heartbeat.progress_s if host == self._here else now)
        if heartbeat.phase != "joining":
            attempt.joined_at = attempt.joined_at or now
        if heartbeat.first_update_s:
            first = heartbeat.first_update_s if host == self._here else now
            attempt.first_update_at = attempt.first_update_at or first

    def _ask(self) -> None:
        answers = on_all_hosts(self._attempt.hosts, self._job, "look")
        self._asked_at = time.monotonic()
        for answer in answers:
            self._unanswered[answer.host] = self._unanswered[answer.host] + 1 if answer.problem else 0
            for heartbeat in answer.ranks:
                self.note(answer.host, heartbeat)
        waits = compare({answer.host: answer.verdict for answer in answers})
        if waits is not None and waits.kind == WAITS:
            # Twice, because the hosts' watchers do not note it at the same moment.
            self._waits[waits.text] += 1
            if self._waits[waits.text] == _LOST:
                say([waits.text])

    def _end(self) -> None:
        """Have the launcher end what it has started, and remove its files."""
        if self._signals.interrupted_by:
            # A terminal's Ctrl-C has reached the launcher as well, and mpirun takes a second one for impatience.
            self._wait(_INTERRUPTED_S / 2)
            self._signal(signal.SIGTERM)
            self._wait(_INTERRUPTED_S)
            return
        is_ending = bool(self._attempt.dead)
        if not is_ending:  # mpirun crashes on a signal while it ends the job
            self._signal(signal.SIGTERM)
        self._killed = self._running()
        for number in self._killed:
            with suppress(ProcessLookupError):
                os.kill(self._attempt.ranks[number].pid, OURS)
        self._wait(_TERMINATED_S)
        if is_ending:
            self._note_codes()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while None in [process.poll() for process in self._processes] and time.monotonic() < deadline:
            self._signals.tick()

    def _conclude(self, answers: Sequence[Answer]) -> None:
        """Judge how the attempt has ended, by what its hosts have answered as well."""
        attempt = self._attempt
        # A rank may do a little more after another has died.
        progress_at = min(attempt.progress_at, attempt.detected_at or attempt.progress_at)
        # A host that is back without being in this attempt may still have the files of an earlier attempt.
        answers = [answer for answer in answers if answer.host in {host.name for host in attempt.hosts}]
        gone = set()
        for answer in answers:
            for heartbeat in answer.ranks:
                self.note(answer.host, heartbeat)
                if heartbeat.pid not in answer.processes and not heartbeat.has_ended:
                    gone.add(heartbeat.rank)
        attempt.progress_at = progress_at
        attempt.was_interrupted = self._signals.interrupted_by is not None
        attempt.lost |= {answer.host: answer.problem for answer in answers if answer.problem}
        attempt.verdict = compare({answer.host: answer.verdict for answer in answers})
        # A rank that has said why it ends may have been seen first, because those that are left take their time.
        seen = [number for number in attempt.dead if not attempt.ranks[number].has_ended]
        asked = {number for number, heartbeat in attempt.ranks.items() if heartbeat.signal}
        attempt.dead = find_dead(seen, gone - self._killed, asked, attempt.host_of)
        attempt.judgement = judge(attempt)


def find_dead(
    seen: Sequence[int], gone: AbstractSet[int], asked: AbstractSet[int], host_of: Mapping[int, str]
) -> Sequence[int]:
    """Return the ranks that died first; none if that is not known.

    Args:
        seen: ranks of this host whose deaths were seen first.
        gone: ranks of any host that were gone at the end, without a word.
        asked: ranks that had got a signal to end. A launcher sends it to the ranks that a dead rank leaves behind.
    """
    if asked and (unasked := gone - asked):
        return sorted(unasked)
    if len(gone) < len(host_of):
        return seen or sorted(gone)
    if len({*host_of.values()}) == 1:
        return seen
    # The launcher has ended the ranks that were left. Where none has noted its signal, and where all ranks of this host
    # died at once, it may have ended those that were seen, after a rank of another host.
    here = {number for number, host in host_of.items() if host in {host_of[number] for number in seen}}
    return seen if asked and {*seen} < here else ()

"""An attempt, which is a start of the job: launch it, watch it, and end it on every host."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence

from trainer.cluster.launchers import STARTS
from trainer.ops.supervise.launchers import launch
from trainer.ops.supervise.options import Options
from trainer.ops.supervise.outcome import Attempt, Facts, judge
from trainer.ops.supervise.ranks import Ranks
from trainer.ops.supervise.remote import Answer, on_all_hosts
from trainer.ops.supervise.signals import Signals
from trainer.watch.compare import compare

_TICK_S = 0.25
_LAUNCHER_ENDS_S = 0.5
"""Time for a launcher to note which rank has died, before the other ranks are killed; they cannot save any more.

If ending them were left to the launcher, ranks with checkpoints would take its SIGTERM for a request to save, and wait
for the dead rank.
"""
_TERMINATED_S = 2.0
_INTERRUPTED_S = 5.0
"""Time for a launcher to end after SIGTERM, or after Ctrl-C, before everything is killed."""


class Running:
    """An attempt that is under way."""

    def __init__(self, attempt: Attempt, options: Options, signals: Signals) -> None:
        self._attempt, self._options, self._signals = attempt, options, signals
        self._ranks = Ranks(attempt.hosts, attempt.job, options.timeout_s)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_preempted = False
        self._idle_s: float | None = None

    def run(self) -> list[Answer]:
        """Start the job, wait for its end, and end what is left; return what all hosts of the job have answered."""
        with tempfile.TemporaryFile() as failed_rank:
            answers, codes = self._run(failed_rank.fileno())
            failed_rank.seek(0)
            self._conclude(answers, codes, [int(line) for line in failed_rank][:1])
        return answers

    def _run(self, failed_rank: int) -> tuple[list[Answer], list[int]]:
        options, attempt = self._options, self._attempt
        try:
            self._processes = launch(options, attempt.hosts, attempt.job, failed_rank)
            self._watch()
            codes = self._codes()
            attempt.times.detected = attempt.times.detected or time.monotonic()
            if self._end():
                codes = self._codes()
        finally:
            self._ranks.close()
            answers = on_all_hosts(options.hosts, attempt.job, "kill")
            for process in self._processes:
                process.kill()
                process.wait()
        attempt.times.ended = time.monotonic()
        return answers, codes

    @property
    def _is_over(self) -> bool:
        # Of several agents, the failure of a single one ends the job; so does the end of all.
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
        """Ask the ranks to save and end, once, if a signal calls for it."""
        if not self._signals.preempts or self._is_preempted:
            return
        self._is_preempted = True
        on_all_hosts(self._attempt.hosts, self._attempt.job, "preempt")
        if not self._ranks.all:  # then nothing can be saved yet
            self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _codes(self) -> list[int]:
        return [code for process in self._processes if (code := process.poll()) is not None]

    def _end(self) -> bool:
        """Have the launcher end what it has started, and remove its files; return whether it did so by itself."""
        if self._signals.interrupted_by:
            # A terminal's Ctrl-C has reached the launcher as well, and mpirun takes a second one for impatience.
            self._wait(_INTERRUPTED_S / 2)
            self._signal(signal.SIGTERM)
            self._wait(_INTERRUPTED_S)
            return False
        by_itself = bool(self._ranks.dead)
        if not by_itself:  # else it is ending the job already, and mpirun crashes on a signal meanwhile
            self._signal(signal.SIGTERM)
        self._ranks.kill()
        self._wait(_TERMINATED_S)
        return by_itself

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while None in [process.poll() for process in self._processes] and time.monotonic() < deadline:
            self._signals.wait(min(_TICK_S, deadline - time.monotonic()))

    def _conclude(self, answers: Sequence[Answer], codes: Sequence[int], failed: Sequence[int]) -> None:
        """Judge how the attempt has ended, from what its hosts have answered and its launcher's exit codes.

        Args:
            failed: the rank that failed first, where the launcher has told it.
        """
        attempt, ranks = self._attempt, self._ranks
        # A host that is back without being in this attempt may still have the files of an earlier attempt.
        answers = [answer for answer in answers if answer.host in {host.name for host in attempt.hosts}]
        gone = self._find_gone(answers)
        asked = {number for number, heartbeat in ranks.all.items() if heartbeat.signal}
        # A rank that has said why it ends may have been seen first, because those that are left take their time.
        silent = [number for number in ranks.dead if not ranks.all[number].has_ended]
        facts = Facts(
            launcher=STARTS[self._options.launcher].name,
            codes=codes,
            ranks=ranks.all,
            host_of=ranks.host_of,
            dead=find_dead(silent, gone, asked, ranks.host_of, failed),
            ended=ranks.ended,
            lost={answer.host: answer.problem for answer in answers if not answer.is_well},
            idle_s=self._idle_s,
            is_preempted=self._is_preempted,
            was_interrupted=self._signals.interrupted_by is not None,
            verdict=compare({answer.host: answer.verdict for answer in answers}),
        )
        attempt.judgement = judge(facts)
        attempt.updates = ranks.updates
        attempt.times.joined, attempt.times.first_update = ranks.joined_at, ranks.first_update_at
        # A rank may do a little more after another has died.
        attempt.times.progress = min(ranks.progress_at, attempt.times.detected or ranks.progress_at)

    def _find_gone(self, answers: Sequence[Answer]) -> set[int]:
        """Take in the last heartbeats; return the ranks that were gone without a word, and that we have not killed."""
        here = {host.name for host in self._attempt.hosts if host.is_here}
        gone = set()
        for answer in answers:
            for heartbeat in answer.ranks:
                self._ranks.note(answer.host, heartbeat)
                is_killed = answer.host in here and heartbeat.rank in self._ranks.killed
                if heartbeat.pid not in answer.processes and not (heartbeat.has_ended or is_killed):
                    gone.add(heartbeat.rank)
        return gone


def find_dead(
    seen: Sequence[int],
    gone: Collection[int],
    asked: Collection[int],
    host_of: Mapping[int, str],
    failed: Sequence[int] = (),
) -> Sequence[int]:
    """Return the ranks that died first; none if that is not known.

    Args:
        seen: ranks of this host whose deaths were seen first.
        gone: ranks of any host that were gone at the end, without a word.
        asked: ranks that had got a signal to end. A launcher sends it to the ranks that a dead rank leaves behind.
        failed: the rank that failed first, where the launcher has told it.
    """
    if silent := sorted(set(gone) & set(failed)):
        return silent
    if asked and (unasked := sorted(set(gone) - set(asked))):
        return unasked
    if len(gone) < len(host_of):
        return seen or sorted(gone)
    if len({*host_of.values()}) == 1:
        return seen
    # The launcher has ended the ranks that were left. Where none has noted its signal, and where all ranks of this host
    # died at once, it may have ended those that were seen, after a rank of another host.
    here = {number for number, host in host_of.items() if host in {host_of[number] for number in seen}}
    return seen if asked and set(seen) < here else ()

"""`trainer run`: start attempt after attempt, until the job is done or another attempt makes no sense."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from trainer.cluster import exit_codes
from trainer.cluster.environment import HANG_TIMEOUT
from trainer.cluster.launchers import STARTS
from trainer.errors import ConfigError
from trainer.ops.command import refuse_missing
from trainer.ops.supervise.attempt import Running
from trainer.ops.supervise.folder import Events, locked
from trainer.ops.supervise.hosts import names, slots_of
from trainer.ops.supervise.launchers import environment_for
from trainer.ops.supervise.options import Options
from trainer.ops.supervise.outcome import Attempt
from trainer.ops.supervise.policy import GiveUpError, bad_hosts, choose_hosts, wait_s
from trainer.ops.supervise.remote import Answer, on_all_hosts
from trainer.ops.supervise.signals import Signals

_PROBE_S = 5.0
_RECOVERY = ("detected", "ended", "started", "joined", "first update")


def supervise(options: Options) -> int:
    """Run the job to its end; return the exit code.

    Raises:
        ConfigError: another process supervises the job, or its command, its launcher or ssh is not installed.
        TrainerError: its folder cannot be written.
    """
    # On other hosts there may be other files.
    here = options.command if any(host.is_here for host in options.hosts) else options.command[:1]
    if problem := refuse_missing(here, environment_for("")["PATH"]):
        raise ConfigError(problem)
    if options.hang_timeout_s is not None:
        os.environ[HANG_TIMEOUT] = f"{options.hang_timeout_s:g}"  # which the ranks inherit
    job = uuid.uuid4().hex
    signals = Signals((signal.SIGTERM, signal.SIGUSR2), (signal.SIGINT, signal.SIGHUP))
    with locked(options.folder, job) as former, signals:
        if former:
            on_all_hosts(options.hosts, former, "kill")
        return Supervisor(options, signals, Events(options.folder / "events.jsonl"), job).run()


class Supervisor:
    """Goes from attempt to attempt.

    Args:
        options: what is to be started.
        signals: what may end it early.
        events: gets what happens.
        job: its id, the same for all attempts, so that what a lost host still runs is ended when the host is back.
    """

    def __init__(self, options: Options, signals: Signals, events: Events, job: str) -> None:
        self._options, self._signals, self._events, self._job = options, signals, events, job
        self._hosts = choose_hosts(options.hosts, (), options.np)
        self.attempts: list[Attempt] = []

    def run(self) -> int:
        """Run the job to its end; return the exit code.

        Raises:
            ConfigError: the launcher, or ssh, is not installed.
        """
        while True:
            answers = self._attempt()
            judgement = self.attempts[-1].judgement
            if judgement.code is not None:
                return self._end(judgement.text, judgement.code)
            try:
                self._choose(answers)
                if seconds := wait_s(self.attempts, self._options.max_restarts, self._hosts):
                    self._events.say("wait", f"no progress; waiting {seconds:.0f} s")
                    self._sleep(seconds)
            except GiveUpError as refusal:
                return self._end(f"{refusal}; the last failure: {judgement.text}", 1)
            if self._signals.has_any:
                return self._end("ended by a signal", exit_codes.PREEMPTED)

    def _attempt(self) -> list[Answer]:
        number = len(self.attempts) + 1
        text = f"attempt {number}: {slots_of(self._hosts)} ranks on {names(self._hosts)}"
        self._events.say("start", text, is_silent=number == 1, attempt=number)
        attempt = Attempt(hosts=self._hosts, launcher=STARTS[self._options.launcher].name)
        answers = Running(attempt, self._job, self._options, self._signals).run()
        self.attempts.append(attempt)
        verdict, text = attempt.judgement.verdict, attempt.judgement.text
        recovery = recovery_of(*self.attempts[-2:]) if number > 1 else {}
        said = f"attempt {number}: {text}" + (f"; recovery took {recovery['total']:.1f} s" if recovery else "")
        facts: dict[str, Any] = {"ranks": slots_of(attempt.hosts), "hosts": names(attempt.hosts)}
        self._events.say(verdict, said, attempt=number, **facts, updates=attempt.updates, recovery_s=recovery, end=text)
        return answers

    def _choose(self, answers: Sequence[Answer]) -> None:
        """Choose the hosts of the next attempt, and wait for hosts while they are too few.

        Raises:
            GiveUpError: they stay too few.
        """
        options = self._options
        deadline, waits = time.monotonic() + options.wait_for_hosts_s, False
        while not self._signals.has_any:
            lost = {answer.host: answer.problem for answer in answers if answer.problem}
            well = [host for host in options.hosts if host.name not in lost]
            bad = bad_hosts(self.attempts, well, options.min_np, time.monotonic())
            chosen = choose_hosts(options.hosts, {*lost, *bad}, options.np)
            problems = [f"{host} does not answer ({problem})" for host, problem in lost.items()]
            problems += [f"{name} is left out, because ranks fail there again and again" for name in bad]
            if slots_of(chosen) >= options.min_np:
                if not {host.name for host in self._hosts} <= {host.name for host in chosen}:
                    self._events.say("hosts", "; ".join(problems), hosts=names(chosen))
                self._hosts = chosen
                return
            text = f"{slots_of(chosen)} of at least {options.min_np} slots are left: {'; '.join(problems)}"
            if time.monotonic() >= deadline:
                raise GiveUpError(f"given up: {text}")
            if not waits:
                self._events.say("wait", f"{text}; waiting up to {options.wait_for_hosts_s:.0f} s for hosts")
                waits = True
            self._sleep(min(_PROBE_S, deadline - time.monotonic()))
            answers = on_all_hosts(options.hosts, self._job, "kill")

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._signals.has_any:
            self._signals.tick()

    def _end(self, text: str, code: int) -> int:
        if self._signals.interrupted_by is not None:
            code = 128 + self._signals.interrupted_by
        self._events.say("end", text, is_silent=text == self.attempts[-1].judgement.text, code=code)
        return code


def recovery_of(before: Attempt, after: Attempt) -> dict[str, float]:
    """Return the seconds from the last progress of an attempt to the first update of the next one, and their parts.

    Empty where a moment between them is not known.
    """
    if (
        before.detected_at is None
        or before.ended_at is None
        or after.joined_at is None
        or after.first_update_at is None
    ):
        return {}
    failure = (before.progress_at, before.detected_at, before.ended_at)
    moments = (*failure, after.started_at, after.joined_at, after.first_update_at)
    parts = [round(end - begin, 3) for begin, end in pairwise(moments)]
    return {**dict(zip(_RECOVERY, parts, strict=True)), "total": round(sum(parts), 3)}

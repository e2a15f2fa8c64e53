"""`trainer run`: start attempt after attempt, until the job is done or another attempt makes no sense."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Sequence

from trainer.cluster import exit_codes
from trainer.cluster.environment import HANG_TIMEOUT
from trainer.errors import ConfigError
from trainer.ops.supervise.attempt import Running
from trainer.ops.supervise.folder import Events, locked
from trainer.ops.supervise.hosts import names, slots_of
from trainer.ops.supervise.launchers import environment_for
from trainer.ops.supervise.options import Options
from trainer.ops.supervise.outcome import Attempt, Judgement, Times, hint
from trainer.ops.supervise.policy import GiveUp, bad_hosts, choose_hosts, decide
from trainer.ops.supervise.remote import Answer, on_all_hosts
from trainer.ops.supervise.signals import Signals
from trainer.ops.supervise.summary import facts_of, summarize

_PROBE_S = 5.0
_NOT_FOUND = 127


def supervise(options: Options) -> int:
    """Run the job to its end; return the exit code.

    Raises:
        ConfigError: another process supervises the job, or its launcher or ssh is not installed.
        TrainerError: its folder cannot be written.
    """
    if options.hang_timeout_s is not None:
        os.environ[HANG_TIMEOUT] = f"{options.hang_timeout_s:g}"  # which the ranks inherit
    job = uuid.uuid4().hex
    with locked(options.folder, job) as former, Signals() as signals:
        events = Events(options.folder / "events.jsonl")
        path = environment_for("")["PATH"]
        if shutil.which("ssh", path=path) is None and not all(host.is_here for host in options.hosts):
            raise ConfigError(
                f"-H names other hosts than this one, and there is no ssh to reach them: {names(options.hosts)}"
            )
        if shutil.which(options.command[0], path=path) is None:
            events.say("end", f"there is no command {options.command[0]!r}", code=_NOT_FOUND)
            return _NOT_FOUND
        if former:
            on_all_hosts(options.hosts, former, "kill")
        return Supervisor(options, signals, events, job).run()


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
        self._attempts: list[Attempt] = []
        self._hosts = choose_hosts(options.hosts, [host.name for host in options.hosts], (), options.ranks)

    @property
    def last_text(self) -> str:
        """How the last attempt ended, and where to read more."""
        judgement = self._attempts[-1].judgement
        return "; ".join(filter(None, (judgement.text, hint(judgement, self._options.hosts))))

    def run(self) -> int:
        """Run the job to its end; return the exit code.

        Raises:
            ConfigError: the launcher is not installed.
        """
        while True:
            answers, judgement = self._attempt()
            if judgement.is_last:
                return self._end(judgement.text, self._code(judgement.code))
            refusal = self._prepare_next(answers)
            if self._signals.has_any:
                return self._end("ended by a signal", self._code(exit_codes.PREEMPTED))
            if refusal is not None:
                if text := hint(judgement, self._options.hosts):
                    self._events.say("hint", text)
                return self._end(f"{refusal.text}; the last failure: {judgement.text}", refusal.code)

    def _code(self, code: int) -> int:
        interrupted_by = self._signals.interrupted_by
        return code if interrupted_by is None else 128 + interrupted_by

    def _attempt(self) -> tuple[list[Answer], Judgement]:
        number = len(self._attempts) + 1
        place = f"{slots_of(self._hosts)} ranks on {names(self._hosts)}"
        if number == 1:
            self._events.note("start", attempt=number, text=place)
        else:
            self._events.say("start", f"attempt {number}: {place}", attempt=number)
        attempt = Attempt(self._hosts, self._job, Times(time.monotonic()), time.time())
        answers = Running(attempt, self._options, self._signals).run()
        judgement = attempt.judgement
        self._attempts.append(attempt)
        self._events.say(
            judgement.verdict, f"attempt {number}: {judgement.text}", attempt=number, updates=attempt.updates
        )
        return answers, judgement

    def _prepare_next(self, answers: Sequence[Answer]) -> GiveUp | None:
        """Choose the hosts of the next attempt, and wait until it may start; return why there is to be none, if so."""
        refusal = self._choose(answers)
        if refusal is not None:
            return refusal
        step = decide(self._attempts, self._options.max_restarts, self._hosts)
        if isinstance(step, GiveUp):
            return step
        if step.wait_s:
            self._events.say("wait", f"no progress; waiting {step.wait_s:.0f} s")
            self._sleep(step.wait_s)
        return None

    def _choose(self, answers: Sequence[Answer]) -> GiveUp | None:
        options = self._options
        deadline = time.monotonic() + options.wait_for_hosts_s
        waits = False
        while not self._signals.has_any:
            well = [answer.host for answer in answers if answer.is_well]
            hosts_well = [host for host in options.hosts if host.name in well]
            bad = bad_hosts(self._attempts, hosts_well, options.min_ranks, time.monotonic())
            chosen = choose_hosts(options.hosts, well, bad, options.ranks)
            problems = [f"{answer.host} does not answer ({answer.problem})" for answer in answers if not answer.is_well]
            problems += [f"{name} is left out, because ranks fail there again and again" for name in bad]
            if slots_of(chosen) >= options.min_ranks:
                if problems and not {host.name for host in self._hosts} <= {host.name for host in chosen}:
                    self._events.say("hosts", "; ".join(problems), hosts=names(chosen))
                self._hosts = chosen
                return None
            text = f"{slots_of(chosen)} of at least {options.min_ranks} slots are left: {'; '.join(problems)}"
            if time.monotonic() >= deadline:
                return GiveUp(f"given up: {text}")
            if not waits:
                self._events.say("wait", f"{text}; waiting up to {options.wait_for_hosts_s:.0f} s for hosts")
                waits = True
            self._sleep(min(_PROBE_S, deadline - time.monotonic()))
            answers = on_all_hosts(options.hosts, self._job, "kill")
        return None

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._signals.has_any:
            self._signals.wait(deadline - time.monotonic())

    def _end(self, text: str, code: int) -> int:
        if len(self._attempts) > 1:
            self._events.say("summary", summarize(self._attempts), **facts_of(self._attempts))
        else:
            self._events.note("summary", **facts_of(self._attempts))
            if text == self._attempts[-1].judgement.text:  # has been said
                self._events.note("end", text=text, code=code)
                return code
        self._events.say("end", text, code=code)
        return code

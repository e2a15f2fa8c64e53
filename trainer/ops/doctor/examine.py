"""`trainer doctor`: finds the facts out, draws the conclusions, and prints them."""

from __future__ import annotations

import signal
import sys
import time

from trainer.ops.doctor.checks import gpus, host, login, names, network, versions
from trainer.ops.doctor.facts import Facts
from trainer.ops.doctor.finding import Cause, Finding, Level, in_order
from trainer.ops.doctor.look import look
from trainer.ops.doctor.options import Options
from trainer.ops.doctor.progress import Progress
from trainer.ops.doctor.report import PREFIX, as_json, as_text, exit_code

# A cause of these kinds explains the later ones of them between the same hosts.
_BETWEEN_HOSTS = (Cause.SAME_HOST, Cause.NAME, Cause.INTERFACE, Cause.REACH, Cause.MTU, Cause.SPEED)


def examine(options: Options) -> int:
    """Look at all hosts and print what was found; return the exit code.

    Raises:
        ConfigError: ssh is not installed.
    """
    began = time.monotonic()
    try:
        with Progress() as progress:
            facts = look(options, progress)
    except KeyboardInterrupt:
        print(f"{PREFIX}interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    findings = judge(facts, options)
    seconds = time.monotonic() - began
    print((as_json if options.as_json else as_text)(facts, findings, seconds))
    return exit_code(facts, findings)


def judge(facts: Facts, options: Options) -> list[Finding]:
    """Return the findings, causes first, without what they explain."""
    found = [
        *names.check(facts), *login.check(facts), *network.check(facts), *versions.check(facts, options),
        *host.check(facts), *gpus.check(facts),
    ]  # fmt: skip
    return in_order([one for one in found if not any(_explains(other, one) for other in found)])


def _explains(cause: Finding, other: Finding) -> bool:
    return (
        cause.level is Level.PROBLEM
        and {cause.cause, other.cause} <= set(_BETWEEN_HOSTS)
        and cause.cause < other.cause
        and set(other.hosts) <= set(cause.hosts)
    )

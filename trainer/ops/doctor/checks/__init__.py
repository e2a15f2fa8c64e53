"""The conclusions of `trainer doctor`: each module turns facts into findings of one kind."""

from __future__ import annotations

from trainer.ops.doctor.checks import gpus, host, login, network
from trainer.ops.doctor.facts import Facts
from trainer.ops.doctor.finding import Cause, Finding, Level

# Between the same hosts, a problem of one of these kinds explains the findings of the later kinds.
_BETWEEN_HOSTS = {Cause.SAME_HOST, Cause.NAME, Cause.INTERFACE, Cause.REACH, Cause.MTU, Cause.SPEED}


def judge(facts: Facts) -> list[Finding]:
    """Return the findings that no other one explains: problems first, and the cause of others before them."""
    checks = (network.check_names, login.check, network.check, host.check, gpus.check)
    findings = list(dict.fromkeys(finding for check in checks for finding in check(facts)))
    causes = [finding for finding in findings if not any(_explains(other, finding) for other in findings)]
    return sorted(causes, key=lambda finding: (finding.level, finding.cause))


def _explains(cause: Finding, other: Finding) -> bool:
    return (
        cause.level is Level.PROBLEM
        and {cause.cause, other.cause} <= _BETWEEN_HOSTS
        and cause.cause < other.cause
        and set(other.hosts) <= set(cause.hosts)
    )

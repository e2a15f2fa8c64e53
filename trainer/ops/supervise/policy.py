"""Decide for `trainer run` whether to start again, when, and on which hosts. No processes, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainer.ops.supervise.hosts import Host, slots_of
from trainer.ops.supervise.outcome import Attempt, Verdict

SAME_UPDATE = 3
"""Failures in a row at the same update that show that another start will not help."""
BAD_HOST, LATEST = 3, 5
"""A host is left out after this many of the latest failures."""
RECENT_S = 3600.0
"""Older failures do not count against a host: in a job of weeks, each host fails now and then."""
LONGEST_WAIT_S = 60.0
_FAILURES = (Verdict.FAILED, Verdict.HUNG)


@dataclass(frozen=True)
class GiveUp:
    """The decision not to start again."""

    text: str
    code: int = 1


@dataclass(frozen=True)
class Restart:
    """The decision to start again after a wait."""

    wait_s: float


def choose_hosts(hosts: Sequence[Host], well: Collection[str], bad: Collection[str], ranks: int) -> tuple[Host, ...]:
    """Return the hosts of the next start, with the ranks of each: in their order, those that are well, and not bad."""
    chosen = []
    for host in hosts:
        taken = min(host.slots, ranks) if host.name in well and host.name not in bad else 0
        ranks -= taken
        if taken:
            chosen.append(Host(host.name, taken))
    return tuple(chosen)


def bad_hosts(history: Sequence[Attempt], hosts: Sequence[Host], min_ranks: int, now: float) -> tuple[str, ...]:
    """Return the hosts on which ranks fail again and again, and that the job can do without.

    Args:
        hosts: those that are well.
        now: on the monotonic clock.
    """
    failures = [past for past in history if past.judgement.verdict in _FAILURES]
    recent = [past for past in failures if past.times.ended is not None and now - past.times.ended < RECENT_S]
    counted = Counter(host for past in recent[-LATEST:] for host in past.judgement.hosts)
    bad: list[str] = []
    for name, count in counted.most_common():
        rest = [host for host in hosts if host.name not in (*bad, name)]
        if count >= BAD_HOST and slots_of(rest) >= min_ranks:
            bad.append(name)
    return tuple(bad)


def decide(history: Sequence[Attempt], max_restarts: int, next_hosts: Sequence[Host]) -> Restart | GiveUp:
    """Return whether to start again after the last attempt, which neither is done nor was the user's mistake.

    Args:
        next_hosts: the hosts of the next start. Other hosts make it another job: a failure may not come back there.
    """
    if len(history) > max_restarts:
        return GiveUp(f"given up after {max_restarts} restarts, which --max-restarts allows")
    latest = history[-SAME_UPDATE:]
    if len(latest) == SAME_UPDATE and all(past.judgement.verdict in _FAILURES for past in latest):
        last_updates = {past.updates[1] if past.updates else None for past in latest}
        if len(last_updates) == 1 and all(past.hosts == tuple(next_hosts) for past in latest):
            update = last_updates.pop()
            where = "before the first update" if update is None else f"after update {update}"
            return GiveUp(f"given up: {SAME_UPDATE} failures in a row {where}; another start would fail there too")
    return Restart(wait_s(history))


def wait_s(history: Sequence[Attempt]) -> float:
    """Return the seconds to wait: none after progress, else 1, 2, 4, … 60 with each attempt without any."""
    fruitless = 0
    for past in reversed(history):
        if past.updates is not None:
            break
        fruitless += 1
    return min(2.0 ** (fruitless - 1), LONGEST_WAIT_S) if fruitless else 0.0

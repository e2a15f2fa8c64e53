"""Decide for `trainer run` whether to start again, when, and on which hosts. No processes, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from trainer.ops.supervise.hosts import Host, slots_of
from trainer.ops.supervise.outcome import Attempt

SAME_UPDATE = 3
"""Failures in a row at the same update that show that another start will not help."""
BAD_HOST, LATEST = 3, 5
"""A host is left out after this many of the latest failures."""
RECENT_S = 3600.0
"""Older failures do not count against a host: in a job of weeks, each host fails now and then."""
LONGEST_WAIT_S = 60.0
_FAILURES = ("failed", "hung")


class GiveUpError(Exception):
    """The decision not to start again; its text says why."""


def choose_hosts(hosts: Sequence[Host], left_out: Collection[str], ranks: int) -> tuple[Host, ...]:
    """Return the hosts of the next start, with the ranks of each: in their order, without those that are left out."""
    chosen = []
    for host in hosts:
        taken = 0 if host.name in left_out else min(host.slots, ranks)
        ranks -= taken
        if taken:
            chosen.append(Host(host.name, taken))
    return tuple(chosen)


def bad_hosts(history: Sequence[Attempt], hosts: Sequence[Host], min_np: int, now: float) -> tuple[str, ...]:
    """Return the hosts on which ranks fail again and again, and that the job can do without.

    Args:
        hosts: those that are well.
        now: on the monotonic clock.
    """
    failures = [past for past in history if past.judgement.verdict in _FAILURES]
    recent = [past for past in failures if past.ended_at is not None and now - past.ended_at < RECENT_S]
    counted = Counter(host for past in recent[-LATEST:] for host in past.judgement.hosts)
    bad: list[str] = []
    for name, count in counted.most_common():
        rest = [host for host in hosts if host.name not in (*bad, name)]
        if count >= BAD_HOST and slots_of(rest) >= min_np:
            bad.append(name)
    return tuple(bad)


def wait_s(history: Sequence[Attempt], max_restarts: int, next_hosts: Sequence[Host]) -> float:
    """Return the seconds to wait before the next start: none after progress, else 1, 2, 4, … 60 with each attempt.

    Args:
        history: all attempts, of which the last neither is done nor was the user's mistake.
        next_hosts: the hosts of the next start. Other hosts make it another job: a failure may not come back there.

    Raises:
        GiveUpError: another start makes no sense.
    """
    if len(history) > max_restarts:
        raise GiveUpError(f"given up after {max_restarts} restarts, which --max-restarts allows")
    latest = history[-SAME_UPDATE:]
    if len(latest) == SAME_UPDATE and all(past.judgement.verdict in _FAILURES for past in latest):
        last_updates = {past.updates[1] if past.updates else None for past in latest}
        if len(last_updates) == 1 and all(past.hosts == tuple(next_hosts) for past in latest):
            update = last_updates.pop()
            where = "before the first update" if update is None else f"after update {update}"
            raise GiveUpError(f"given up: {SAME_UPDATE} failures in a row {where}; another start would fail there too")
    fruitless = next((number for number, past in enumerate(reversed(history)) if past.updates), len(history))
    return min(2.0 ** (fruitless - 1), LONGEST_WAIT_S) if fruitless else 0.0

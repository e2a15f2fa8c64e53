"""The verdicts of a job's hosts beside each other: each is by the ranks of one host, and `trainer run` reads all."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.watch.job_folder import DIFFERENT, HANG, WAITS, JobVerdict


def compare(verdicts: Mapping[str, JobVerdict | None]) -> JobVerdict | None:
    """Return the verdict on the job: which ranks are stuck, else what the hosts wait for; None where nothing is known.

    Args:
        verdicts: by host; None of a host whose watcher has noted none, or that does not answer.
    """
    known = [verdict for verdict in verdicts.values() if verdict is not None]
    hangs = [verdict for verdict in known if verdict.kind == HANG]
    if stuck := [verdict for verdict in hangs if verdict.culprits]:
        culprits = sorted(rank for verdict in stuck for rank in verdict.culprits)
        return JobVerdict(HANG, "; ".join(verdict.text for verdict in stuck), tuple(culprits))
    if not hangs and (different := [verdict for verdict in known if verdict.kind == DIFFERENT]):
        return different[0]
    if len(verdicts) == 1 or not known:
        return next(iter(known), None)
    return JobVerdict(HANG if hangs else WAITS, _lay_beside(verdicts))


def _lay_beside(verdicts: Mapping[str, JobVerdict | None]) -> str:
    waits = {host: verdict.text for host, verdict in verdicts.items() if verdict is not None}
    others = [host for host in verdicts if host not in waits]
    if not others and len({*waits.values()}) == 1:
        return f"all hosts wait for {next(iter(waits.values()))}, and none of them is missing"
    text = "; ".join(f"{host} waits for {what}" for host, what in waits.items())
    if others:
        return f"{text}; {', '.join(others)} {'do' if len(others) > 1 else 'does'} not: look there for the cause"
    return f"the hosts wait for different things: {text}"

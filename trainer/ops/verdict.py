"""Verdicts: what a host's watcher has found out about the job, where it notes it, and what those of all hosts say.

Each is by the ranks of one host, and `trainer run` reads all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

from trainer.files import write_atomically
from trainer.untrusted import parse_json
from trainer.watch.job_folder import is_ours, job_folder

HANG, DIFFERENT, WAITS = "hang", "different collectives", "waits"
"""Kinds of verdict: the host's ranks are ended because the job hangs; it has failed because ranks called different
collectives; all ranks of the host wait, and nothing is ended yet."""
VERDICT = "verdict.json"
"""A file in the job's folder."""


@dataclass(frozen=True)
class JobVerdict:
    """What a host's watcher has found out about the job."""

    kind: str
    text: str
    """If all ranks of one of several hosts wait, for what; else a sentence."""
    culprits: tuple[int, ...] = ()
    """Ranks that are to blame."""


def write_verdict(verdict: JobVerdict | None) -> None:
    """Note what was found out about the job where `trainer run` finds it, as one line of JSON; None takes it back."""
    folder = job_folder()
    if folder is not None and is_ours(folder):
        with suppress(OSError):
            if verdict is None:
                (folder / VERDICT).unlink(missing_ok=True)
            else:
                write_atomically(folder / VERDICT, json.dumps(asdict(verdict)) + "\n")


def parse_verdict(line: str | bytes) -> JobVerdict | None:
    """Return what `write_verdict` has noted; None for anything else."""
    with suppress(ValueError, LookupError, TypeError, OverflowError):
        entry = parse_json(line)
        return JobVerdict(str(entry["kind"]), str(entry["text"]), tuple(map(int, entry["culprits"])))
    return None


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

"""The summary at the end: the attempts, what each recovery took, and the share of the time that was training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from trainer.ops.supervise.hosts import names, slots_of
from trainer.ops.supervise.outcome import Attempt

_PARTS = ("detected", "ended", "started", "joined", "first update")
_HEAD = ("attempt", "start", "ranks", "hosts", "updates", "recovery", "end")


def recovery_of(earlier: Attempt, later: Attempt) -> dict[str, float]:
    """Return the seconds from the last progress of an attempt to the first update of the next one, and their parts.

    Empty where one of the moments between them is not known.
    """
    before, after = earlier.times, later.times
    moments = (before.progress, before.detected, before.ended, after.started, after.joined, after.first_update)
    known = [moment for moment in moments if moment is not None]
    if len(known) < len(moments):
        return {}
    parts = dict(zip(_PARTS, (end - begin for begin, end in pairwise(known)), strict=True))
    return {**parts, "total": known[-1] - known[0]}


def training_share(attempts: Sequence[Attempt]) -> float:
    """Return the share of the time, from the first start to the last end, between first updates and last progress."""
    begin, end = attempts[0].times.started, attempts[-1].times.ended
    if end is None or end <= begin:
        return 0.0
    spans = [
        attempt.times.progress - attempt.times.first_update
        for attempt in attempts
        if attempt.times.progress is not None and attempt.times.first_update is not None
    ]
    return sum(max(0.0, span) for span in spans) / (end - begin)


def facts_of(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Return the summary for events.jsonl."""
    recoveries = [{}, *(recovery_of(*pair) for pair in pairwise(attempts))]
    rows = [
        {
            "start": attempt.wall_clock,
            "ranks": slots_of(attempt.hosts),
            "hosts": names(attempt.hosts),
            "updates": attempt.updates,
            "recovery_s": {name: round(value, 3) for name, value in recovery.items()},
            "verdict": attempt.judgement.verdict,
            "end": attempt.judgement.text,
        }
        for attempt, recovery in zip(attempts, recoveries, strict=True)
    ]
    return {"attempts": rows, "training_share": round(training_share(attempts), 4)}


def summarize(attempts: Sequence[Attempt]) -> str:
    """Return the summary as a table, with a line for each attempt."""
    rows = [_HEAD]
    for number, entry in enumerate(facts_of(attempts)["attempts"], 1):
        total = entry["recovery_s"].get("total")
        start = time.strftime("%H:%M:%S", time.localtime(entry["start"]))
        updates = "–".join(map(str, entry["updates"] or ["none"]))
        recovery = f"{total:.1f} s" if total is not None else "–"
        rows.append((str(number), start, str(entry["ranks"]), entry["hosts"], updates, recovery, entry["end"]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [_describe(number, *pair) for number, pair in enumerate(pairwise(attempts), 2) if recovery_of(*pair)]
    return "\n".join([*lines, f"{100 * training_share(attempts):.0f} % of the time was training"])


def _describe(number: int, earlier: Attempt, later: Attempt) -> str:
    parts = recovery_of(earlier, later)
    return f"recovery of attempt {number}: " + ", ".join(f"{name} {value:.1f} s" for name, value in parts.items())

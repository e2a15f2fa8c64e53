"""What the runs of a benchmark say together: medians, and ratios of runs of the same round.

The limit on N ranks is the epoch time of N ranks that compute side by side without exchanging gradients. One rank's
time divided by N is no fair limit, because the other cores are idle then: ranks that run at the same time share memory
bandwidth, the clock's headroom and the hypervisor's time, whether they exchange gradients or not.

What slows the machine down for a while slows all runs of a round. So ratios are taken within a round, and their median
over the rounds counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.contestants import CONTESTANTS, LIMIT, OURS, Run

_HEAD = (
    "| an epoch of | ours, s | best peer, s | ours / best peer | limit, s | of the limit | others |\n"
    "|---|---|---|---|---|---|---|"
)
_SHARES = "| an epoch of | ran, s | waited for a core, s | the rest, s |\n|---|---|---|---|"


def epoch_seconds(run: Run) -> float:
    """Return the seconds of an epoch after the first, which warms up; the median where there are several."""
    assert run.report is not None
    return statistics.median(run.report.seconds[1:])


def table(runs: Sequence[Run]) -> str:
    """Return a table as docs/results.md has it: a row for each network and number of ranks, over all rounds."""
    rows: dict[tuple[str, int], dict[str, dict[int, float]]] = {}
    for run in runs:
        if run.problem is None:
            of_row = rows.setdefault((run.network, run.ranks), {})
            of_row.setdefault(run.contestant, {})[run.round] = epoch_seconds(run)
    return "\n".join([_HEAD, *(f"| {' | '.join(_cells(*key, seconds))} |" for key, seconds in rows.items())])


def shares(runs: Sequence[Run]) -> str:
    """Return a table of where the seconds of rank 0's last epoch went, medians over all rounds.

    The rest is sleep, until the gradients have come, and time that a hypervisor took. Contestants that are scripts of
    their own say nothing of it: ours for the tutorial network, and the plain example.
    """
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for run in runs:
        if run.problem is None and run.report is not None and (ran := run.report.scheduled[0]):
            row, waited = f"{run.network}, {run.ranks} × {run.contestant}", run.report.scheduled[1]
            rows.setdefault(row, []).append((ran, waited, run.report.seconds[-1] - ran - waited))
    medians = {row: map(statistics.median, zip(*of, strict=True)) for row, of in rows.items()}
    return "\n".join([_SHARES, *(f"| {row} | {' | '.join(f'{s:.2f}' for s in of)} |" for row, of in medians.items())])


def _cells(network: str, ranks: int, seconds: Mapping[str, Mapping[int, float]]) -> list[str]:
    ours, limit = seconds.get(OURS, {}), seconds.get(LIMIT, {})
    medians = {name: statistics.median(by_round.values()) for name, by_round in seconds.items()}
    peers = sorted(medians.keys() - {OURS, LIMIT}, key=medians.__getitem__)
    named = [f"{medians[name]:.2f} {CONTESTANTS[network][name].title}" for name in peers]
    to_best, of_limit = _ratio(ours, seconds[peers[0]]) if peers else None, _ratio(limit, ours)
    return [
        f"{network}, {ranks} rank{'s' * (ranks > 1)}",
        f"{medians[OURS]:.2f} ({min(ours.values()):.2f} – {max(ours.values()):.2f})" if ours else "",
        named[0] if named else "",
        f"{to_best:.2f}" if to_best else "",
        f"{medians[LIMIT]:.2f}" if limit else "",
        f"{100 * of_limit:.0f} %" if of_limit else "",
        ", ".join(named[1:]),
    ]


def _ratio(over: Mapping[int, float], under: Mapping[int, float]) -> float | None:
    """Return the median ratio of the rounds that both have; None where there is none."""
    ratios = [over[number] / under[number] for number in over.keys() & under.keys()]
    return statistics.median(ratios) if ratios else None

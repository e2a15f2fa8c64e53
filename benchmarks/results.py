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

_HEAD = "| contestant | ranks | s/epoch, median | min – max | of the limit | × ours' time |\n|---|---|---|---|---|---|"


def epoch_seconds(run: Run) -> float:
    """Return the seconds of an epoch after the first, which warms up; the median where there are several."""
    assert run.report is not None
    return statistics.median(run.report.seconds[1:])


def table(runs: Sequence[Run]) -> str:
    """Return a network's table in Markdown: a row for each number of ranks and contestant, over all rounds."""
    lines = [_HEAD]
    for ranks in sorted({run.ranks for run in runs}):
        of_ranks = [run for run in runs if run.ranks == ranks and run.problem is None]
        seconds = {
            name: {run.round: epoch_seconds(run) for run in of_ranks if run.contestant == name}
            for name in CONTESTANTS[runs[0].network]
        }
        for name, by_round in seconds.items():
            if by_round:
                values = by_round.values()
                of_limit, to_ours = _ratio(seconds[LIMIT], by_round), _ratio(by_round, seconds[OURS])
                cells = [CONTESTANTS[runs[0].network][name].title, str(ranks), f"{statistics.median(values):.2f}"]
                cells += [f"{min(values):.2f} – {max(values):.2f}", f"{100 * of_limit:.0f} %" if of_limit else ""]
                cells += [f"{to_ours:.2f}" if to_ours else ""]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(over: Mapping[int, float], under: Mapping[int, float]) -> float | None:
    """Return the median ratio of the rounds that both have; None where there is none."""
    ratios = [over[number] / under[number] for number in over.keys() & under.keys()]
    return statistics.median(ratios) if ratios else None

"""From runs to one table: medians, ratios paired by round, and whether the targets are met."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.contestants import CONTESTANTS, TRAIN_SAMPLES, Run
from benchmarks.overhead import Overhead

MOST_OVERHEAD_US = 20.0
MOST_OVERHEAD_PERCENT = 1.0
# What it is, whose seconds are divided by whose (each on so many ranks), and the least that the ratio shall be.
_COMPARED = (
    ("2 ranks: faster than the plain Horovod example", ("plain", 2), ("ours", 2), 3.0),
    ("2 ranks: faster than the DDP loop", ("ddp", 2), ("ours", 2), 1.2),
    ("2 ranks: faster than the Horovod loop as it comes", ("horovod", 2), ("ours", 2), 1.3),
    ("2 ranks over 1 rank on 1 core, images/s", ("ours", 1), ("ours", 2), 1.8),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contestant on so many ranks, over all rounds."""

    contestant: str
    ranks: int
    runs: int
    """That count; the others failed."""
    median_s: float
    """Per epoch, the first epoch of each run discarded."""
    least_s: float
    most_s: float
    images_per_s: float
    """At the median."""
    times_ours: float | None
    """Its seconds over ours, each round for itself, then the median; None without ours."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Something that we set out to reach."""

    text: str
    value: float
    wanted: float
    unit: str
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.value <= self.wanted if self.at_most else self.value >= self.wanted


def epoch_seconds(run: Run) -> float:
    """Seconds of an epoch after the first, which warms up; the median where there are several."""
    assert run.report is not None
    return statistics.median(run.report.seconds[1:])


def paired_ratio(runs: Sequence[Run], over: tuple[str, int], under: tuple[str, int]) -> float | None:
    """Median over rounds of one (contestant, ranks)'s seconds over another's in the same round.

    What slows the machine down for a while slows both runs of a round, and leaves their ratio alone.
    None when no round has both.
    """
    upper, lower = _by_round(runs, *over), _by_round(runs, *under)
    ratios = [upper[number] / lower[number] for number in upper.keys() & lower.keys()]
    return statistics.median(ratios) if ratios else None


def make_rows(runs: Sequence[Run]) -> list[Row]:
    """A row for each contestant and number of ranks that has a run which counts."""
    rows = []
    for ranks in sorted({one.ranks for one in runs}):
        for name in CONTESTANTS:
            seconds = list(_by_round(runs, name, ranks).values())
            if seconds:
                median = statistics.median(seconds)
                rows.append(
                    Row(
                        contestant=name,
                        ranks=ranks,
                        runs=len(seconds),
                        median_s=median,
                        least_s=min(seconds),
                        most_s=max(seconds),
                        images_per_s=TRAIN_SAMPLES / median,
                        times_ours=paired_ratio(runs, (name, ranks), ("ours", ranks)),
                    )
                )
    return rows


def make_targets(runs: Sequence[Run], overheads: Sequence[Overhead], step_us: float | None) -> list[Target]:
    """The targets for which there are measurements.

    Args:
        step_us: of the tutorial network on one rank, µs; see `tutorial_step_us`.
    """
    targets = []
    for text, over, under, wanted in _COMPARED:
        ratio = paired_ratio(runs, over, under)
        if ratio is not None:
            targets.append(Target(text=text, value=ratio, wanted=wanted, unit="×"))
    # On two ranks the exchange makes the blocks too uneven for a verdict; our layer is the same one there.
    for overhead in (one for one in overheads if one.ranks == 1):
        text = "our layer, per step"
        targets.append(Target(text=text, value=overhead.median_us, wanted=MOST_OVERHEAD_US, unit=" µs", at_most=True))
        if step_us is not None:
            share = 100 * overhead.median_us / step_us
            text = "our layer, of the tutorial network's step"
            targets.append(Target(text=text, value=share, wanted=MOST_OVERHEAD_PERCENT, unit=" %", at_most=True))
    return targets


def tutorial_step_us(runs: Sequence[Run], batch_size: int) -> float | None:
    """µs of one step of ours on one rank; None when it was not run there."""
    seconds = list(_by_round(runs, "ours", 1).values())
    return statistics.median(seconds) / (TRAIN_SAMPLES / batch_size) * 1e6 if seconds else None


def render_rows(rows: Sequence[Row]) -> str:
    """The table, as text."""
    head = ("contestant", "ranks", "s/epoch", "min-max", "images/s", "× ours' time")
    body = [
        (
            CONTESTANTS[row.contestant].title,
            str(row.ranks),
            f"{row.median_s:.2f}",
            f"{row.least_s:.2f}-{row.most_s:.2f}",
            f"{row.images_per_s:,.0f}",
            "" if row.times_ours is None else f"{row.times_ours:.2f}",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in (head, *body)) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in (head, tuple("-" * w for w in widths), *body))
    ]
    return "\n".join(lines)


def render_targets(targets: Sequence[Target]) -> str:
    """A line for each target: what is wanted, what was found, and whether that will do."""
    width = max((len(target.text) for target in targets), default=0)
    return "\n".join(
        f"{target.text.ljust(width)}  {target.value:7.2f}{target.unit}  (wanted: "
        f"{'≤' if target.at_most else '≥'} {target.wanted:g}{target.unit})  {'met' if target.met else 'FELL SHORT'}"
        for target in targets
    )


def render_overhead(overhead: Overhead) -> str:
    """One measurement of our layer's cost, in a line."""
    return (
        f"our layer, {_in_words(overhead.ranks)}: {overhead.median_us:.1f} µs per step "
        f"(quartiles {overhead.low_us:.1f}-{overhead.high_us:.1f}; {overhead.pairs} pairs of blocks of "
        f"{overhead.steps} steps; a whole step of the probe by hand: {overhead.by_hand_us:.0f} µs)"
    )


def _by_round(runs: Sequence[Run], contestant: str, ranks: int) -> dict[int, float]:
    return {
        one.round: epoch_seconds(one)
        for one in runs
        if (one.contestant, one.ranks) == (contestant, ranks) and one.problem is None
    }


def _in_words(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"

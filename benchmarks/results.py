"""Results of a benchmark: medians, ratios paired by round, the limit, and the targets.

The limit on N ranks is the epoch time of N ranks that compute side by side without exchanging gradients. One rank's
time divided by N is no fair limit, because the other cores are idle then: ranks that run at the same time share memory
bandwidth, the clock's headroom and the hypervisor's time, whether they exchange gradients or not.

Ratios are taken within a round, then their median over the rounds. Quartiles are those of `statistics.quantiles` with
method "exclusive"; for three rounds they are the smallest and the largest ratio.

Ours is behind a peer when the whole interquartile range of the ratios (our seconds / the peer's seconds) is above 1.
Targets that rest on rounds are judged from three rounds on.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from benchmarks.contestants import CONTESTANTS, DDP, LIMIT, ON_DDP, OURS, PEERS, Run
from benchmarks.overhead import Overhead
from benchmarks.workloads import TUTORIAL, WORKLOADS

BEHIND_RULE = (
    "ours is behind a peer when the whole interquartile range of the rounds' ratios (our seconds / its seconds) is "
    "above 1.\nFewer than 3 rounds are not judged"
)
LEAST_PERCENT_OF_LIMIT = 95.0
MOST_OVERHEAD_US = 20.0
_LEAST_ROUNDS = 3
# What the ratio says, whose seconds are divided (None for those on one rank), and by whose.
_RATIOS = (
    ("{}: plain Horovod example / ours, seconds", "plain", OURS),
    ("{}: DDP loop / ours, seconds", DDP, OURS),
    ("{}: Horovod loop with default settings / ours, seconds", "horovod", OURS),
    ("{} / 1 rank on 1 core, ours, throughput", None, OURS),
)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A value over the rounds."""

    median: float
    low: float
    """The lower quartile; the smallest value where there are fewer than three."""
    high: float
    """The upper quartile; the largest value where there are fewer than three."""
    rounds: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contestant on so many ranks, over all rounds."""

    contestant: str
    title: str
    ranks: int
    runs: int
    """Runs that count; the others failed."""
    median_s: float
    """Per epoch, the first epoch of each run discarded."""
    least_s: float
    most_s: float
    per_s: float
    """Images or bytes, at the median."""
    percent_of_limit: Spread | None
    """100 × the limit's seconds / this contestant's seconds, paired by round; None without the limit."""
    times_ours: float | None
    """Median of this contestant's seconds / ours, paired by round; None without ours."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Least seconds of an epoch on so many ranks of this machine."""

    ranks: int
    side_by_side_s: float
    """Median epoch of the ranks that compute at the same time without exchange. This is the limit."""
    alone_s: float | None
    """Median epoch of one rank alone, divided by the number of ranks; None where it was not measured."""
    alone_percent: Spread | None
    """100 × `alone_s` / `side_by_side_s`, paired by round: what is lost by computing side by side."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A value that is wanted, and what was measured."""

    text: str
    value: float
    wanted: float
    unit: str
    at_most: bool = False
    low: float
    """Lower quartile of the value."""
    high: float
    """Upper quartile of the value."""
    met: bool | None
    """None where the measurements do not suffice."""
    reason: str = ""
    """Why the target is not judged."""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A value without a target."""

    text: str
    value: float
    unit: str


def epoch_seconds(run: Run) -> float:
    """Return the seconds of an epoch after the first, which warms up; the median where there are several."""
    assert run.report is not None
    return statistics.median(run.report.seconds[1:])


def paired_ratios(runs: Sequence[Run], over: tuple[str, int], under: tuple[str, int]) -> list[float]:
    """Return one (contestant, ranks)'s seconds over another's, for each round that has both.

    What slows the machine down for a while slows both runs of a round, and leaves their ratio alone.
    """
    upper, lower = _by_round(runs, *over), _by_round(runs, *under)
    return [upper[number] / lower[number] for number in sorted(upper.keys() & lower.keys())]


def spread(values: Sequence[float]) -> Spread | None:
    """Return median and quartiles; None where there is no value."""
    if not values:
        return None
    low, high = min(values), max(values)
    if len(values) >= _LEAST_ROUNDS:
        low, _, high = statistics.quantiles(values, n=4, method="exclusive")
    return Spread(median=statistics.median(values), low=low, high=high, rounds=len(values))


def make_rows(runs: Sequence[Run]) -> list[Row]:
    """Return a row for each contestant and number of ranks that has a run which counts; all runs are of a network."""
    rows = []
    for ranks in sorted({one.ranks for one in runs}):
        for name in CONTESTANTS[runs[0].network]:
            if seconds := list(_by_round(runs, name, ranks).values()):
                rows.append(_row(runs, name, ranks, seconds))
    return rows


def _row(runs: Sequence[Run], name: str, ranks: int, seconds: list[float]) -> Row:
    to_ours = spread(paired_ratios(runs, (name, ranks), (OURS, ranks)))
    network = runs[0].network
    return Row(
        contestant=name,
        title=CONTESTANTS[network][name].title,
        ranks=ranks,
        runs=len(seconds),
        median_s=statistics.median(seconds),
        least_s=min(seconds),
        most_s=max(seconds),
        per_s=WORKLOADS[network].samples * WORKLOADS[network].items[0] / statistics.median(seconds),
        percent_of_limit=_percent(runs, (LIMIT, ranks), (name, ranks)),
        times_ours=to_ours.median if to_ours else None,
    )


def make_limits(runs: Sequence[Run]) -> list[Limit]:
    """Return the limit for each number of ranks above 1 on which it was measured."""
    limits = []
    alone = list(_by_round(runs, LIMIT, 1).values())
    for ranks in sorted({one.ranks for one in runs} - {1}):
        if seconds := list(_by_round(runs, LIMIT, ranks).values()):
            limits.append(
                Limit(
                    ranks=ranks,
                    side_by_side_s=statistics.median(seconds),
                    alone_s=statistics.median(alone) / ranks if alone else None,
                    alone_percent=_percent(runs, (LIMIT, 1), (LIMIT, ranks), divisor=ranks),
                )
            )
    return limits


def make_targets(runs: Sequence[Run], overheads: Sequence[Overhead], cores: int) -> list[Target]:
    """Return the targets for which there are measurements.

    Args:
        cores: that the ranks may use.
    """
    targets = []
    for ranks in sorted({one.ranks for one in runs} - {1}):
        found = _percent(runs, (LIMIT, ranks), (OURS, ranks))
        if found is not None:
            targets.append(_limit_target(found, ranks, cores))
    for ranks in sorted({one.ranks for one in runs}):
        for name in PEERS:
            ratio = spread(paired_ratios(runs, (OURS, ranks), (name, ranks)))
            if ratio is not None:
                targets.append(_peer_target(CONTESTANTS[runs[0].network][name].title, ranks, ratio))
    # On two ranks the exchange makes the blocks too uneven to judge; our layer is the same code there.
    return targets + [_overhead_target(one) for one in overheads if one.ranks == 1]


def make_facts(runs: Sequence[Run], overheads: Sequence[Overhead]) -> list[Fact]:
    """Return the ratios to the peers, and what layers cost a step, for which there are measurements."""
    facts = []
    network = runs[0].network
    steps_of_one = WORKLOADS[network].samples / WORKLOADS[network].batch_size
    several = sorted({one.ranks for one in runs} - {1})
    for ranks, (text, over, under) in product(several, _RATIOS):
        pair = (over, ranks) if over else (under, 1)
        if ratio := spread(paired_ratios(runs, pair, (under, ranks))):
            facts.append(Fact(text=text.format(in_words(ranks)), value=ratio.median, unit="×"))
    # On one rank Accelerate leaves DDP out, which the other two loops have there as well.
    for ranks, name in product(several, ON_DDP):
        wrapped, plain = _by_round(runs, name, ranks), _by_round(runs, DDP, ranks)
        if costs := [
            (wrapped[one] - plain[one]) / steps_of_one * ranks * 1e6 for one in sorted(wrapped.keys() & plain.keys())
        ]:
            text = f"{in_words(ranks)}: {CONTESTANTS[network][name].title} beside the DDP loop, per step"
            facts.append(Fact(text=text, value=statistics.median(costs), unit=" µs"))
    seconds = list(_by_round(runs, OURS, 1).values())
    # `Trainer` is measured, which the transformer is not trained with.
    for overhead in (one for one in overheads if one.ranks == 1 and seconds and network == TUTORIAL):
        step_us = statistics.median(seconds) / steps_of_one * 1e6
        text = "1 rank: our layer's share of the tutorial network's step"
        facts.append(Fact(text=text, value=100 * overhead.median_us / step_us, unit=" %"))
    return facts


def _limit_target(found: Spread, ranks: int, cores: int) -> Target:
    shared = f"{in_words(ranks)} share {cores} core{'s' * (cores > 1)}"
    reason = _too_few(found) or (shared if cores < ranks else "")
    return Target(
        text=f"{in_words(ranks)}: ours, of the limit",
        value=found.median,
        wanted=LEAST_PERCENT_OF_LIMIT,
        unit=" %",
        low=found.low,
        high=found.high,
        met=None if reason else found.median >= LEAST_PERCENT_OF_LIMIT,
        reason=reason,
    )


def _peer_target(title: str, ranks: int, ratio: Spread) -> Target:
    reason = _too_few(ratio)
    return Target(
        text=f"{in_words(ranks)}: not behind {title}",
        value=ratio.median,
        wanted=1.0,
        unit="×",
        at_most=True,
        low=ratio.low,
        high=ratio.high,
        met=None if reason else ratio.low <= 1.0,
        reason=reason,
    )


def _overhead_target(overhead: Overhead) -> Target:
    return Target(
        text="1 rank: our layer, per step",
        value=overhead.median_us,
        wanted=MOST_OVERHEAD_US,
        unit=" µs",
        at_most=True,
        low=overhead.low_us,
        high=overhead.high_us,
        met=overhead.median_us <= MOST_OVERHEAD_US,
    )


def _too_few(found: Spread) -> str:
    return "" if found.rounds >= _LEAST_ROUNDS else f"fewer than {_LEAST_ROUNDS} rounds"


def _percent(runs: Sequence[Run], over: tuple[str, int], under: tuple[str, int], *, divisor: int = 1) -> Spread | None:
    return spread([100 * ratio / divisor for ratio in paired_ratios(runs, over, under)])


def _by_round(runs: Sequence[Run], contestant: str, ranks: int) -> dict[int, float]:
    return {
        one.round: epoch_seconds(one)
        for one in runs
        if (one.contestant, one.ranks) == (contestant, ranks) and one.problem is None
    }


def in_words(ranks: int) -> str:
    """Return "1 rank", "2 ranks" and so on."""
    return f"{ranks} rank{'s' * (ranks > 1)}"

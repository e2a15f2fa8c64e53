"""The benchmark's results as text."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.overhead import Overhead
from benchmarks.results import BEHIND_RULE, Fact, Limit, Row, Target, in_words


def render_rows(rows: Sequence[Row], unit: str) -> str:
    """Return the table of contestants, whose throughput has this unit."""
    head = ("contestant", "ranks", "s/epoch", "min-max", unit, "% of limit", "quartiles", "× ours' time")
    body = [_cells(row) for row in rows]
    widths = [max(len(line[column]) for line in (head, *body)) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in (head, tuple("-" * w for w in widths), *body))
    ]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    part = row.percent_of_limit
    return (
        row.title,
        str(row.ranks),
        f"{row.median_s:.2f}",
        f"{row.least_s:.2f}-{row.most_s:.2f}",
        f"{row.per_s:,.0f}",
        f"{part.median:.1f}" if part else "",
        f"{part.low:.1f}-{part.high:.1f}" if part else "",
        "" if row.times_ours is None else f"{row.times_ours:.2f}",
    )


def render_limit(limit: Limit) -> str:
    """Return both candidates for the limit on so many ranks, which one is used, and why."""
    used = (
        f"limit on {in_words(limit.ranks)}: {limit.side_by_side_s:.2f} s/epoch, {in_words(limit.ranks)} side by side "
        "without exchange"
    )
    if limit.alone_s is None or limit.alone_percent is None:
        return used
    return (
        f"{used}\n"
        f"  one rank alone / {limit.ranks}: {limit.alone_s:.2f} s/epoch, {limit.alone_percent.median:.1f} % of that\n"
        "  The first is used: ranks that run at the same time share memory bandwidth, clock and hypervisor, with or "
        "without exchange;\n  a rank that is alone shares them with nobody."
    )


def render_targets(targets: Sequence[Target]) -> str:
    """Return a line for each target (what is wanted, what was measured, whether it is met), then the rule."""
    width = max((len(target.text) for target in targets), default=0)
    lines = [
        f"{target.text.ljust(width)}  {target.value:7.2f}{target.unit}  "
        f"(quartiles {target.low:.2f}-{target.high:.2f}; wanted: {'≤' if target.at_most else '≥'} "
        f"{target.wanted:g}{target.unit})  {_verdict(target)}"
        for target in targets
    ]
    return "\n".join([*lines, f"Rule: {BEHIND_RULE}."])


def _verdict(target: Target) -> str:
    if target.met is None:
        return f"not judged: {target.reason}"
    if not target.met:
        return "MISSED"
    return "met" if target.value <= target.wanted or not target.at_most else "met within the noise"


def render_facts(facts: Sequence[Fact]) -> str:
    """Return a line for each value without a target; an empty string where there is none."""
    if not facts:
        return ""
    width = max((len(fact.text) for fact in facts), default=0)
    lines = [f"{fact.text.ljust(width)}  {fact.value:7.2f}{fact.unit}" for fact in facts]
    return "\n".join(["For information:", *lines])


def render_overhead(overhead: Overhead) -> str:
    """Return one measurement of our layer's cost, in a line."""
    return (
        f"our layer, {in_words(overhead.ranks)}: {overhead.median_us:.1f} µs per step "
        f"(quartiles {overhead.low_us:.1f}-{overhead.high_us:.1f}; {overhead.pairs} pairs of blocks of "
        f"{overhead.steps} steps; a whole step of the hand-written loop: {overhead.by_hand_us:.0f} µs)"
    )

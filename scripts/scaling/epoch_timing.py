"""What the step timer writes: one epoch of all ranks, from the steps that each rank has timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

SETTINGS = ("precision", "compression", "sync_every")
"""Names in `RunConfig` of what changes the exchange, or does not go with what does."""


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Mean seconds of a step of one rank."""

    step: float
    input: float
    compute: float
    blocked: float


@dataclass(frozen=True, kw_only=True)
class EpochTiming:
    """One epoch of all ranks, after the warm-up. Times are mean seconds of a step, over steps and ranks."""

    world_size: int
    hosts: list[str]
    """Of each rank."""
    machines: int
    """Number of machines; containers on one machine count once."""
    cores: int
    """Of rank 0's host."""
    threads: int
    """PyTorch's, per rank."""
    device: str
    strategy: str
    gradient_bytes: int
    """All-reduced by each rank in an update, before compression."""
    gradient_shapes: list[list[int]]
    """Of each parameter that requires a gradient."""
    settings: dict[str, Any]
    """The script's own, of `SETTINGS`."""
    workers: int | None
    """Processes that load for each rank, 0 where it does so itself; None where the dataset is in memory."""
    samples_in_epoch: int
    """In the whole dataset."""
    steps: int
    """Number of measured steps."""
    updates: int
    """Optimizer updates in those steps, each with one exchange."""
    samples: int
    """Of all ranks in those steps."""
    seconds: float
    """Of those steps on the slowest rank."""
    input: float
    compute: float
    exchange: float
    """Blocked time of the slowest rank (the straggler), which the other ranks wait for."""
    waiting: float
    """Blocked time of a rank beyond that: waiting for the straggler."""
    hidden: float | None
    """Part of the exchange that overlaps with the backward pass; None where the strategy cannot tell."""
    window: float
    """How long a gradient waits for the last one, mean over bytes: the time with which buckets can overlap."""
    own: list[float]
    """Unblocked seconds of a step, from the quickest steps to the slowest: the means of up to 100 groups of equal
    size. The steps of one update count as one, by their mean."""
    ranks: list[Phases]


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step of one rank."""

    step: float
    input: float
    blocked: float
    window: float
    count: int
    """Samples."""
    is_update: bool


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """What one rank has measured in an epoch."""

    host: str
    machine: str
    steps: Sequence[StepTimes]
    exchange_seconds: float | None
    """Sum over the epoch, as the strategy has timed it; None where it cannot tell."""


def summarize(by_rank: Sequence[RankTimes], **facts: Any) -> EpochTiming:
    """Combine all ranks' times.

    Args:
        facts: the fields of `EpochTiming` that are not computed from times.
    """
    rows = [rank.steps for rank in by_rank]
    by_step = list(zip(*rows, strict=True))
    # All ranks leave an all-reduce together, so the rank that is blocked for the shortest time came last.
    exchange = fmean(min(times.blocked for times in step) for step in by_step)
    phases = [_phases(steps) for steps in rows]
    updates = sum(times.is_update for times in rows[0])
    timed = [rank.exchange_seconds for rank in by_rank if rank.exchange_seconds is not None]
    return EpochTiming(
        hosts=[rank.host for rank in by_rank],
        machines=len({rank.machine for rank in by_rank}),
        steps=len(by_step),
        updates=updates,
        samples=sum(times.count for steps in rows for times in steps),
        seconds=max(sum(times.step for times in steps) for steps in rows),
        input=fmean(phase.input for phase in phases),
        compute=fmean(phase.compute for phase in phases),
        exchange=exchange,
        waiting=fmean(phase.blocked for phase in phases) - exchange,
        hidden=max(0.0, min(timed) / len(by_step) - exchange) if timed else None,
        window=fmean(times.window for steps in rows for times in steps) * len(by_step) / max(1, updates),
        own=_group_means([seconds for steps in rows for seconds in _unblocked(steps)]),
        ranks=phases,
        **facts,
    )


def _unblocked(steps: Sequence[StepTimes]) -> Iterator[float]:
    """Mean unblocked seconds of the steps of each update, because the ranks synchronize once in an update."""
    taken: list[float] = []
    for times in steps:
        taken.append(times.step - times.blocked)
        if times.is_update:
            yield fmean(taken)
            taken = []


def _group_means(seconds: Sequence[float]) -> list[float]:
    groups = np.array_split(np.sort(seconds), min(100, len(seconds))) if seconds else []
    return [round(float(group.mean()), 6) for group in groups]


def _phases(steps: Sequence[StepTimes]) -> Phases:
    step, put_in, blocked = (fmean(getattr(times, name) for times in steps) for name in ("step", "input", "blocked"))
    return Phases(step=step, input=put_in, compute=step - put_in - blocked, blocked=blocked)

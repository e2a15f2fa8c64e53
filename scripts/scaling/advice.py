"""Advice on a run that does not scale, each with the speed-up that it promises; for scaling_test.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scaling.models import Link

_ACCUMULATE = (2, 4, 8)
_WORTH_IT = 1.1
"""Promises below this factor are not made: a measurement could not tell."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A shape under one strategy: mean seconds of a step, and samples/s."""

    shape: str
    strategy: str
    ranks: int
    input: float
    compute: float
    exchange: float
    waiting: float
    hidden: float
    gradient_bytes: int
    samples_per_s: float
    efficiency: float | None
    """None where a rank by itself was not measured so."""
    cores: int
    """Of all machines together."""
    threads: int
    """Of all ranks together."""

    @property
    def step(self) -> float:
        return self.input + self.compute + self.exchange + self.waiting


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Something to do, and how many times as many samples/s it promises."""

    what: str
    gain: float
    options: tuple[str, ...] = ()
    """Of examples/mnist.py; a script of one's own has its own names for them. Empty where no option does it."""


def advise(run: Measured, others: Sequence[Measured], halved: float | None, busy: float = 0.0) -> list[Advice]:
    """What promises at least a tenth more samples/s, the best first.

    Args:
        others: everything else that was measured, with the same batch.
        halved: what part of its time an exchange of half the bytes takes on this shape; None where nobody knows.
        busy: input and compute of a step while all ranks are at it, seconds. Ranks that share cores, and mostly wait,
            are quicker than that in what they do in between.
    """
    found = [*_accumulate(run, busy), *_compress(run, halved), *_change(run, others)]
    return sorted((one for one in found if one.gain >= _WORTH_IT), key=lambda one: -one.gain)


def sentence(run: Measured, advice: Sequence[Advice], link: Link | None) -> str:
    """All of it, for a person."""
    lost = run.exchange + run.waiting
    known = "not known" if run.efficiency is None else f"{run.efficiency:.0%}"
    parts = [f"{run.shape} under {run.strategy}: efficiency {known}."]
    if run.threads > run.cores:
        parts.append(
            f"{run.threads} threads share {run.cores} cores, so that {run.cores / run.threads:.0%} is all there can be."
        )
    if link is not None and math.isfinite(link.gbit_per_s):
        parts.append(
            f"The link carries {link.gbit_per_s:.3g} Gbit/s, a small message takes {link.latency_s * 1e3:.2g} ms."
        )
    parts.append(f"At this batch the exchange takes {run.exchange / run.compute:.2g} × the compute"
                 f" and waiting for the slowest rank {run.waiting / run.compute:.2g} ×")  # fmt: skip
    if run.input > lost and run.input > 0.1 * run.step:
        parts[-1] += f"; input takes {run.input / run.step:.0%} of a step: load with more workers, or from memory"
    if not advice:
        parts[-1] += "; nothing that is known here would make it a tenth faster."
        return " ".join(parts)
    listed = [f"{one.what} for about {one.gain:.2g} ×" for one in advice[:3]]
    return " ".join(parts) + "; " + ", or ".join(listed) + "."


def _accumulate(run: Measured, busy: float) -> list[Advice]:
    """One exchange for k steps. Unevenness of k steps adds up like independent noise, with the root of k."""
    found = []
    for steps in _ACCUMULATE:
        step = max(busy, run.input + run.compute) + run.exchange / steps + run.waiting / math.sqrt(steps)
        what = f"accumulate {steps} (a global batch {steps} times as large)"
        found.append(Advice(what=what, gain=run.step / step, options=("--accumulate", str(steps))))
    # The smallest that has most of what the largest has: a large global batch has a price of its own.
    enough = 1 + 0.75 * (max(one.gain for one in found) - 1)
    return [one for one in found if one.gain >= enough][:1]


def _compress(run: Measured, halved: float | None) -> list[Advice]:
    if halved is None:
        return []
    saved = (run.exchange + run.hidden) * (1 - halved)
    gain = run.step / (run.step - min(saved, run.exchange))
    return [Advice(what="use fp16 compression", gain=gain, options=("--compression", "fp16"))]


def _change(run: Measured, others: Sequence[Measured]) -> list[Advice]:
    """The best strategy on this shape, and the best of the smaller shapes."""
    same = [one for one in others if one.shape == run.shape and one.strategy != run.strategy]
    smaller = [one for one in others if one.ranks < run.ranks]
    found = []
    if same:
        best = max(same, key=lambda one: one.samples_per_s)
        gain = best.samples_per_s / run.samples_per_s
        found.append(Advice(what=f"take strategy {best.strategy}", gain=gain, options=("--strategy", best.strategy)))
    if smaller:
        best = max(smaller, key=lambda one: one.samples_per_s)
        found.append(
            Advice(what=f"stay with {best.shape} ({best.strategy})", gain=best.samples_per_s / run.samples_per_s)
        )
    return found

"""What scaling_test.py runs, and what it reports of a shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from scaling.advice import Advice, Measured
from scaling.models import Prediction, Shape

PHASES = ("input", "compute", "exchange", "waiting")
"""Of a step, in the timing of a run."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A job, and its outcome once it has ended."""

    shape: Shape
    strategy: str
    scaling: str
    """weak or strong; both for 1x1; alone for a single rank with its share of the cores, the baseline of efficiency;
    side by side for ranks of a host that exchange nothing."""
    round: int
    batch: int
    """Samples per rank and step."""
    options: tuple[str, ...] = ()
    """Further options of the script."""
    timing: dict[str, Any] | None = None
    """Fields of `EpochTiming`; None where the run failed."""
    problem: str | None = None
    """Why the run failed, in one line."""

    def ended(self, *, timing: dict[str, Any] | None = None, problem: str | None = None) -> Run:
        """Return this run with its outcome."""
        return replace(self, timing=timing, problem=problem)

    @property
    def samples_per_s(self) -> float:
        return float(self.timing["samples"] / self.timing["seconds"]) if self.timing else 0.0

    def __str__(self) -> str:
        words = [str(self.shape), self.strategy, self.scaling, f"batch {self.batch}", *self.options]
        return f"{' '.join(words)}, round {self.round}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians of a shape under one strategy, over all rounds."""

    shape: Shape
    strategy: str
    scaling: str
    batch: int
    runs: int
    least: float
    """samples/s of the slowest run."""
    most: float
    """samples/s of the fastest run."""
    accumulate: float
    """Steps of an update."""
    epoch_s: float
    speedup: float | None
    """Relative to 1x1 with default settings; None where 1x1 was not measured."""
    measured: Measured
    predicted: Prediction | None
    predicted_samples_per_s: float | None

    @property
    def error(self) -> float | None:
        """Return the relative error of the predicted samples/s."""
        if self.predicted_samples_per_s is None:
            return None
        return self.predicted_samples_per_s / self.measured.samples_per_s - 1


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Advice that can be tested with a run."""

    advice: Advice
    base: float
    """samples/s without the advice."""

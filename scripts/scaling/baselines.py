"""What a rank does without an exchange: by itself, or beside as many others as a machine computes with at once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from scaling.models import Rank
from scaling.runs import PHASES, Run
from trainer.strategies.buckets import divide


@dataclass
class Baselines:
    """Runs without an exchange, one per round of each kind."""

    alone: dict[tuple[int, int], list[Run]] = field(default_factory=dict)
    """Of a single rank, by batch and PyTorch threads."""
    side_by_side: dict[tuple[int, int, int], list[Run]] = field(default_factory=dict)
    """Of several ranks that exchange nothing, by batch, PyTorch threads and number of ranks."""

    def rank(self, batch: int, threads: int, at_once: int = 1) -> Rank | None:
        """Return the medians of a rank, one of so many that compute at once; None where none was measured.

        Where so many were not measured, it is one of the nearest number, or else a single one.
        """
        beside = {
            count: timings
            for (*kind, count), runs in self.side_by_side.items()
            if kind == [batch, threads] and (timings := _timings(runs))
        }
        timings = _timings(self.alone.get((batch, threads), ()))
        if at_once > 1 and beside:
            timings = beside[min(beside, key=lambda count: abs(count - at_once))]
        return _medians(timings) if timings else None

    def is_measured(self, batch: int, threads: int, at_once: int) -> bool:
        """Return whether there is a run of just so many ranks that compute at once."""
        runs = self.alone.get((batch, threads)) if at_once == 1 else self.side_by_side.get((batch, threads, at_once))
        return bool(_timings(runs or ()))

    def single_rank_runs(self) -> list[Run]:
        """Return all runs of a single rank."""
        return [run for runs in self.alone.values() for run in runs]

    def side_by_side_runs(self) -> list[Run]:
        """Return all runs of ranks that exchange nothing."""
        return [run for runs in self.side_by_side.values() for run in runs]


def ranks_at_once(timing: dict[str, Any]) -> int:
    """Return how many ranks of a run compute at once on a machine's cores, with a core or more each.

    Ranks on CPUs share memory and clock, so that each takes longer than one by itself. GPUs share neither.
    """
    if timing["device"] != "cpu":
        return 1
    of_machine, with_cores = timing["world_size"] // timing["machines"], timing["cores"] // timing["threads"]
    return int(max(1, min(of_machine, with_cores)))


def steps_per_update(timing: dict[str, Any]) -> float:
    """Return the steps of an update, which accumulation makes several."""
    return float(timing["steps"] / max(1, timing["updates"]))


def messages_of(timing: dict[str, Any]) -> int:
    """Return the number of buckets that the gradients are sent as, where all are of one type.

    DDP's own buckets, 1 MB and then 25 MB each, are counted alike.
    """
    shapes = timing["gradient_shapes"]
    sizes = {dtype.itemsize: dtype for dtype in (torch.float16, torch.float64, torch.float32)}
    element_size = timing["gradient_bytes"] // max(1, sum(map(math.prod, shapes)))
    dtype = sizes.get(element_size, torch.float32)
    return max(1, len(divide([torch.empty(shape, dtype=dtype, device="meta") for shape in shapes])))


def _timings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [run.timing for run in runs if run.timing]


def _medians(timings: Sequence[dict[str, Any]]) -> Rank:
    # Not strict, because a run of fewer than 100 updates has fewer groups.
    rounds = zip(*(timing["own"] for timing in timings), strict=False)
    medians = {name: statistics.median(timing[name] for timing in timings) for name in (*PHASES, "window")}
    return Rank(
        # Without an exchange, what follows the last gradient is computed as well.
        input=medians["input"],
        compute=sum(medians[name] for name in PHASES[1:]),
        window=medians["window"],
        gradient_bytes=timings[0]["gradient_bytes"],
        messages=messages_of(timings[0]),
        step_groups=tuple(map(statistics.median, rounds)),
        accumulate=steps_per_update(timings[0]),
    )

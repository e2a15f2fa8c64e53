"""How long the ranks of a host may be without progress: given, or measured from their own steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from trainer.ops.watcher.job import View
from trainer.watch.heartbeat import TRAINING

LEAST_S, LONGEST_S = 30.0, 540.0
"""Bounds of a limit that is measured. torch.distributed ends a job by itself after 600 s."""
FACTOR = 10.0
_LATELY = 100
_FIRST_STEPS = 3
"""Steps that are not measured, because they compile, allocate and connect."""


class Limit:
    """The longest time without progress, for each stage of the job apart.

    Args:
        given_s: what the user has set; None measures.
        start_s: the limit until the first step.
    """

    def __init__(self, given_s: float | None, start_s: float, now: float) -> None:
        self._given_s, self._start_s = given_s, start_s
        self.progress_at = now
        """When a rank did something last. Set it to begin anew, where the time since then is not the job's."""
        self.stage = "start"
        self._gaps: dict[str, deque[float]] = {}
        self._left: set[str] = set()

    def on_progress(self, views: Collection[View], now: float) -> None:
        """Note that a rank has done something."""
        if (gap := now - self.progress_at) >= 1.0:
            self._gaps.setdefault(self.stage, deque(maxlen=_LATELY)).append(gap)
        self.progress_at = now
        stage = stage_of(views)
        if stage != self.stage:
            self._left.add(self.stage)
            self.stage = stage

    @property
    def longest(self) -> float:
        """The limit for what may go on by itself, such as a slow network or work on one rank."""
        return max(LONGEST_S, self.seconds)

    @property
    def seconds(self) -> float:
        """The limit in the stage that the job is in."""
        if self.stage == "start":
            return self._start_s
        if self._given_s is not None:
            return self._given_s
        # What an evaluation or a checkpoint takes is known once the job has come through one.
        if self.stage not in ("training", *self._left):
            return LONGEST_S
        longest = max(self._gaps.get(self.stage, ()), default=0.0)
        return min(max(LEAST_S, FACTOR * longest), LONGEST_S)


def stage_of(views: Collection[View]) -> str:
    """Return what the job does: "start" before its first step, else "training", or what a rank does beside it."""
    steps = max((view.steps for view in views), default=0)
    if steps < 1:
        return "start"
    others = sorted({"ended" if view.is_at_end else view.phase for view in views} - TRAINING)
    if others:
        return ", ".join(others)
    return "training" if steps > _FIRST_STEPS else "first steps"

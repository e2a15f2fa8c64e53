"""What a watcher knows: its host, and a view of each rank there."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from trainer.watch.heartbeat import Heartbeat, State

WORKS = "works"
"""Excuse of a rank that may be at work outside all collectives, as when rank 0 alone evaluates or saves."""
STOPPED, TRACED, UNINTERRUPTIBLE = "T", "t", "D"
"""States of a process, beside `trainer.cluster.processes.GONE`."""


class View(Heartbeat):
    """A rank, as its host's watcher sees it: its heartbeat, and what a look from outside has added.

    A look may replace what the rank itself has noted that it waits for.
    """

    process = "S"
    """The kernel's letter for its main thread."""
    cpu = 0.0
    """Share of a processor that its main thread takes."""
    frames: tuple[str, ...] = ()
    """Its main thread's stack, the innermost line first, once it was looked at."""
    at = ""
    """Where the user's own code is in that stack, such as "train.py:31"."""
    stacks = ""
    """Stacks of all its threads."""
    excuse = ""
    """Why it may be without progress: it compiles, it works, or a debugger is at work."""
    is_recorded = False
    """Whether the flight recorder tells what it waits for: its `group`, `number` and `steps_before` are of that."""

    def changed_since(self, other: View) -> bool:
        """Return whether it has done anything since."""
        return self.counters != other.counters

    @property
    def counters(self) -> tuple[int, ...]:
        """Numbers of which one grows whenever it goes on."""
        return (self.events, self.steps, self.updates, self.pieces, self.enqueued, self.completed)

    @property
    def waits(self) -> bool:
        return bool(self.state == State.WAITING)

    @property
    def collective(self) -> tuple[object, ...]:
        """The collective that it waits in: equal for ranks that wait in the same one."""
        if self.is_recorded:
            return (self.what, self.group, self.number, self.elements)
        return (self.what, self.collectives, self.steps, self.elements)

    def replaced(self, **changes: Any) -> View:
        """Return a copy with some fields changed."""
        changed = copy.copy(self)
        for name, value in changes.items():
            setattr(changed, name, value)
        return changed


@dataclass
class Host:
    """A host, as its watcher sees it."""

    name: str
    views: dict[int, View] = field(default_factory=dict)
    """Of its ranks that can be looked at, by their number, in ascending order."""
    is_whole_job: bool = True
    """Whether these are all ranks of the job. If not, the cause of a hang may be elsewhere."""

    @property
    def names(self) -> dict[int, str]:
        """What each rank is called in messages: "rank 1 on b"."""
        return {rank: f"rank {rank} on {self.name}" for rank in self.views}


@dataclass
class Settings:
    """What the watcher of a host is told."""

    host: str
    """The name of its host."""
    size: int
    """How many ranks the job has."""
    given_s: float | None
    """How long the job may be without progress, as the user has set it; None where that is measured."""
    start_s: float
    """The limit until the first step."""
    script: str
    """Name of the training script, of which that of the stacks' folder is made."""

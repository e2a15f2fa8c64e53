"""What the hub knows of a rank and of a host: sent as JSON, judged without any process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainer.watch.mark_layout import State

WORKS = "works"
"""Excuse of a rank that may be at work outside all collectives, as where rank 0 alone evaluates or saves."""
SAVING = "saving"
"""The phase of a rank that saves a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A rank, as its host's watcher sees it."""

    rank: int
    state: int = State.BETWEEN
    what: str = ""
    is_counted: bool = False
    collectives: int = 0
    steps: int = 0
    elements: int = 0
    updates: int = 0
    events: int = 0
    progress: int = 0
    phase: str = ""
    last: str = ""
    last_elements: int = 0
    failures: int = 0
    folder: str = ""
    process: str = "S"
    """The kernel's letter for its main thread."""
    cpu: float = 0.0
    """Share of a processor that its main thread takes."""
    frames: tuple[str, ...] = ()
    """Its main thread's stack, the innermost line first, once it was looked at."""
    at: str = ""
    """Where the user's own code is in that stack, such as "train.py:31"."""
    stacks: str = ""
    """Of all threads."""
    excuse: str = ""
    """Why its silence is none: it compiles, it works, or a debugger is at work."""
    enqueued: int = 0
    """Collectives by the flight recorder, where it is read; likewise `completed`."""
    completed: int = 0
    group: str = ""
    """Where the recorder tells what it waits in: the process group, such as "NCCL 0"."""
    number: int = 0
    """Of that collective, in its group."""
    steps_before: int = 0
    """Steps before that collective, which the program may be ahead of."""

    def changed_since(self, other: View) -> bool:
        """Return whether it has done anything since."""
        return self.counters != other.counters

    @property
    def counters(self) -> tuple[int, ...]:
        """What grows while it goes on."""
        return (self.events, self.steps, self.updates, self.progress, self.enqueued, self.completed)

    @property
    def waits(self) -> bool:
        return self.state == State.WAITING

    @property
    def collective(self) -> tuple[object, ...]:
        """What tells the collective that it waits in from any other one."""
        if self.group:
            return (self.what, self.group, self.number, self.elements)
        return (self.what, self.collectives, self.steps, self.elements)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def view_from(fields: Mapping[str, Any]) -> View:
    """Return the view that `as_dict` has described.

    Raises:
        TypeError: it is something else.
    """
    view = View(**fields)
    return replace(view, frames=tuple(map(str, view.frames)))


@dataclass
class Host:
    """A host of the job, as the hub sees it."""

    name: str
    ranks: tuple[int, ...]
    views: dict[int, View] = field(default_factory=dict)
    heard_at: float = 0.0
    """When its watcher was heard last; 0 before."""
    is_connected: bool = False
    has_left: bool = False
    """Its watcher has said goodbye: its ranks have ended."""
    is_lost: bool = False
    """Its connection has timed out, which a watcher that ends does not do."""
    is_silent: bool = False
    """Its watcher has not answered a question, and nothing else has come from it since."""

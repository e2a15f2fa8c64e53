"""What the watchers know of a job: its hosts, and a view of each rank."""

from __future__ import annotations

import base64
import copy
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.watch.heartbeat import SIZE, Heartbeat, State

WORKS = "works"
"""Excuse of a rank that may be at work outside all collectives, as when rank 0 alone evaluates or saves."""
UNREACHABLE = "unreachable"
"""Problem of a host whose connection has timed out, or whose watcher does not answer a question."""
UNWATCHED = "unwatched"
"""Problem of a host whose watcher has not connected, or has ended by itself."""
STOPPED, TRACED, UNINTERRUPTIBLE = "T", "t", "D"
"""States of a process, beside `trainer.cluster.processes.GONE`."""
_SEEN = ("process", "cpu", "frames", "at", "stacks", "excuse", "is_recorded")
"""What a look from outside adds to a heartbeat."""


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

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON can tell it."""
        record = base64.b85encode(zlib.compress(bytes(self), 1)).decode()
        return {"heartbeat": record, **{name: getattr(self, name) for name in _SEEN}}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> View:
        """Return the view that `as_dict` has described.

        Raises:
            ValueError, TypeError, LookupError, OverflowError: it is something else.
        """
        try:
            record = zlib.decompressobj().decompress(base64.b85decode(fields["heartbeat"]), SIZE)
        except zlib.error as error:
            raise ValueError(f"no heartbeat: {error}") from None
        seen = {name: type(getattr(cls, name))(fields[name]) for name in _SEEN}
        return cls.from_buffer_copy(record).replaced(**{**seen, "frames": tuple(map(str, seen["frames"]))})


@dataclass
class Host:
    """A host of the job, as the hub sees it."""

    name: str
    ranks: tuple[int, ...]
    views: dict[int, View] = field(default_factory=dict)
    heard_at: float = 0.0
    """When its watcher was heard last; 0 before."""
    problem: str = UNWATCHED
    """Why its ranks cannot be asked: `UNREACHABLE` or `UNWATCHED`; empty where they can, or its watcher has left."""
    has_left: bool = False
    """Its watcher has said goodbye: its ranks have ended."""
    has_looked: bool = False
    """Its watcher has answered the hub's latest look."""

    @property
    def can_be_asked(self) -> bool:
        return not (self.problem or self.has_left)


@dataclass
class Job:
    """A job that is watched, as the watcher of one host is told of it."""

    hosts: list[Host]
    """All hosts; the first has rank 0, and its watcher is the hub."""
    number: int
    """Which of them this one is."""
    token: str
    """Known to the job's watchers alone."""
    given_s: float | None
    """How long the job may be without progress, as the user has set it; None where that is measured."""
    start_s: float
    """The limit until the first step."""
    endpoint: str
    """The hub's address and port; empty where the job has one host."""
    script: str
    """Name of the training script, of which that of the stacks' folder is made."""


def views_of(hosts: Iterable[Host]) -> dict[int, View]:
    """Return the views of all ranks that were seen, in the order of the ranks."""
    return dict(sorted((rank, view) for host in hosts for rank, view in host.views.items()))


def names_of(hosts: Iterable[Host]) -> dict[int, str]:
    """Return what each rank is called in messages: "rank 1 on b"."""
    return {rank: f"rank {rank} on {host.name}" for host in hosts for rank in host.ranks}

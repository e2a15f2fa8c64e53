"""What a watcher knows: its host, and a view of each rank there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from trainer.watch.heartbeat import Heartbeat


class Doing(Enum):
    """What a rank does, as messages say it."""

    RUNS = "is in user code"
    WAITS = "waits in a collective"
    LOADS = "waits for its data"
    FAILED = "has failed in a collective, and has not ended"
    DEBUGS = "is in a debugger"
    STOPPED = "is stopped (by SIGSTOP or Ctrl-Z)"
    ENDED = "has ended: its script has reached its end, or has called sys.exit"
    GONE = "is gone: its process has ended"


@dataclass
class View(Heartbeat):
    """A rank, as its host's watcher sees it: its heartbeat, and what a look from outside has added.

    A look may replace what the rank itself has noted that it waits for.
    """

    doing: Doing = Doing.RUNS
    frames: Sequence[str] = ()
    """Its main thread's stack, the innermost line first, once it was looked at."""
    at: str = ""
    """Where the user's own code is in that stack, such as "train.py:31"."""
    stacks: str = ""
    """Stacks of all its threads."""
    is_recorded: bool = False
    """Whether what it waits for is the flight recorder's."""

    @property
    def progress(self) -> int:
        """A number that changes whenever it goes on."""
        return self.events + self.pieces + self.enqueued + self.completed


@dataclass
class Host:
    """A host, as its watcher sees it."""

    name: str
    views: dict[int, View] = field(default_factory=dict)
    """Of its ranks that can be looked at, by their number, in ascending order."""
    is_whole_job: bool = True
    """Whether these are all ranks of the job. If not, the cause of a hang may be elsewhere."""


@dataclass
class Settings:
    """What the watcher of a host is told."""

    host: str
    """The name of its host."""
    size: int
    """How many ranks the job has."""
    given_s: float | None
    """How long the job may be without progress, as the user has set it; None where they have not."""
    start_s: float
    """The limit until the first step."""
    script: str
    """Name of the training script, of which that of the stacks' folder is made."""
    records: dict[str, str] = field(default_factory=dict)
    """The path of each rank's heartbeat."""

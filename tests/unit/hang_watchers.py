"""A watcher, in this process, of ranks that are no processes."""

from __future__ import annotations

import time
from typing import Any

from trainer.ops.watcher.job import Doing, Settings, View
from trainer.ops.watcher.ranks import LocalRanks
from trainer.ops.watcher.watcher import Watcher
from trainer.watch.heartbeat import State


class Ranks(LocalRanks):
    """Ranks of a host that are no processes."""

    def __init__(self, *views: View, with_stack: View | None = None) -> None:
        super().__init__({})
        self.seen = {view.rank: view for view in views}
        self.with_stack = with_stack
        """How one of them is seen when its stack is looked at, if differently."""
        self.looks = 0
        self.are_ended = False

    @property
    def running(self) -> list[int]:
        return [] if self.are_ended else [0]

    def views(self) -> dict[int, View]:
        return dict(self.seen)

    def views_with_stacks(self) -> dict[int, View]:
        self.looks += 1
        return self.seen | ({self.with_stack.rank: self.with_stack} if self.with_stack else {})

    def end(self) -> None:
        self.are_ended = True


def waiting(rank: int, what: str = "gradients", **facts: Any) -> View:
    facts = {"doing": Doing.WAITS, "state": State.WAITING, "steps": 7, "collectives": 3, **facts}
    return View(rank=rank, what=what, **facts)


def absent(rank: int, doing: Doing = Doing.RUNS, /, **facts: Any) -> View:
    return View(rank=rank, doing=doing, **{"steps": 7, "collectives": 3, **facts})


def watcher_of(ranks: Ranks, given_s: float | None, *, others: int = 0) -> Watcher:
    """The watcher of a host, beside which the job has `others` ranks on other hosts."""
    return Watcher(Settings("a", len(ranks.seen) + others, given_s, 1800.0, "job"), ranks)


def run(watcher: Watcher, seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not watcher.verdict:
        watcher.tick()
        time.sleep(0.01)

"""A watcher, in this process, of ranks that are no processes."""

from __future__ import annotations

import time

from trainer.ops.watcher.job import Settings, View
from trainer.ops.watcher.ranks import LocalRanks
from trainer.ops.watcher.watcher import Watcher
from trainer.watch.heartbeat import State


class Ranks(LocalRanks):
    """Ranks of a host that are no processes."""

    def __init__(self, *views: View) -> None:
        super().__init__({})
        self.seen = {view.rank: view for view in views}
        self.looks = 0
        self.are_ended = False

    def views(self) -> dict[int, View]:
        return dict(self.seen)

    def views_with_stacks(self) -> dict[int, View]:
        self.looks += 1
        return dict(self.seen)

    def end(self) -> None:
        self.are_ended = True


def waiting(rank: int, steps: int = 9) -> View:
    return View(rank=rank, state=State.WAITING, what="gradients", steps=steps)


def settings_of(given_s: float | None, size: int, host: str = "a") -> Settings:
    return Settings(host, size, given_s, max(given_s or 0.0, 1800.0), "job")


def watcher_of(ranks: Ranks, given_s: float | None, *, others: int = 0, host: str = "a") -> Watcher:
    """The watcher of a host, beside which the job has `others` ranks on other hosts."""
    return Watcher(settings_of(given_s, len(ranks.seen) + others, host), ranks)


def run(watcher: Watcher, seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not watcher.verdict:
        watcher.tick()
        time.sleep(0.01)

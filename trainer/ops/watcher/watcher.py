"""The watcher of one host: what hub and spokes have in common."""

from __future__ import annotations

import time
from typing import Any

from trainer.cluster.output import say
from trainer.ops.watcher.job import Host, Job, View, views_of
from trainer.ops.watcher.judge import Verdict
from trainer.ops.watcher.limits import Limit
from trainer.ops.watcher.ranks import LocalRanks
from trainer.ops.watcher.report import HANG, write_stacks
from trainer.ops.watcher.wire import Link

SILENT_S = 15.0
"""A watcher that was not heard for so long is lost. Hosts whose watcher never was are named after this time."""


class Watcher:
    """Watches the ranks of one host, in connection with the watchers of others.

    Args:
        ranks: of this host.
    """

    def __init__(self, job: Job, ranks: LocalRanks) -> None:
        self._job, self._ranks = job, ranks
        self._hosts, self._here = job.hosts, job.hosts[job.number]
        self._limit = Limit(job.given_s, job.start_s, time.monotonic())
        self._links: list[Link] = []
        self._has_moved = False
        self.verdict: Verdict | None = None

    @property
    def readers(self) -> list[Any]:
        """Sockets from which something may come."""
        return [*self._links]

    @property
    def writers(self) -> list[Link]:
        """Connections on which something has not been sent yet."""
        return [link for link in self._links if link.wants_to_write]

    def postpone(self) -> None:
        """Count the time without progress anew, because this host has slept."""
        now = time.monotonic()
        self._limit.progress_at = now
        for link in self._links:
            link.heard_at = now

    def end(self) -> None:
        """Print the verdict, and end the ranks of this host."""
        if self.verdict is not None:
            say(self.verdict.lines, HANG)
            self._tell_verdict(self.verdict)
            write_stacks(self.verdict, self._hosts, self._job.script)
            self._ranks.end(self.verdict.first, self.verdict.culprits)

    def _tell_verdict(self, verdict: Verdict) -> None:
        """Have other hosts end their ranks too."""

    def _idle_s(self, now: float) -> float:
        return now - self._limit.progress_at

    def _note(self, host: Host, views: dict[int, View], now: float) -> bool:
        """Take in what ranks of a host do; return whether one of them has done something since."""
        earlier = host.views
        moved = any(rank not in earlier or view.changed_since(earlier[rank]) for rank, view in views.items())
        host.views = {**earlier, **views}
        self._has_moved |= moved
        return moved

    def _note_progress(self, now: float) -> None:
        """Note whether a rank has done something, after all hosts were heard: this looks at the ranks of the job."""
        if self._has_moved:
            self._limit.on_progress(views_of(self._hosts).values(), now)
        self._has_moved = False

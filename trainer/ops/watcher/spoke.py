"""The watcher of a host without rank 0: tells the hub what its ranks do, and ends them when the hub says so."""

from __future__ import annotations

import errno
import time
from typing import Any

from trainer.ops.watcher.job import Job, View
from trainer.ops.watcher.judge import Verdict, has_failed, is_paused
from trainer.ops.watcher.ranks import LocalRanks
from trainer.ops.watcher.watcher import SILENT_S, Watcher
from trainer.ops.watcher.wire import BROKEN, Link, connect, is_timeout

_REPORT_S = 1.0
_AGAIN_S, _TRIES = 5.0, 6


class Spoke(Watcher):
    """Watches the ranks of one host for the hub."""

    def __init__(self, job: Job, ranks: LocalRanks) -> None:
        super().__init__(job, ranks)
        self._is_done = self._is_lost = False
        self._reported_at = self._next_try = self._next_look = 0.0
        self._failures = 0
        self._has_told_failure = False

    def tick(self) -> None:
        """Report to the hub, and do what it says."""
        now = time.monotonic()
        views = self._ranks.views()
        self._note(self._here, views)
        self._note_progress(now)
        try:
            self._talk(views, now)
        except BROKEN as error:
            self._lose(error)
        if is_paused([self._here]):
            self._limit.progress_at = now
        elif self._is_lost and now >= self._next_look and self._idle_s(now) > self._limit.seconds + SILENT_S:
            self._next_look = now + SILENT_S
            self._judge(now)

    def leave(self) -> None:
        """Tell the hub that the ranks of this host have ended."""
        for link in self._links:
            self._send(link, self._ranks.views(), bye=True)
            link.flush_for(0.5)
            link.close()

    def _judge(self, now: float) -> None:
        """Blame the host of rank 0 where ranks of this one wait, and none of them has an excuse."""
        views = self._ranks.views_with_stacks()
        self._note(self._here, views)
        self._note_progress(now)
        if self._idle_s(now) <= self._limit.seconds:  # one has gone on while it was looked at
            return
        has_excuse = any(view.excuse for view in views.values()) and self._idle_s(now) < self._limit.longest
        if has_excuse or not any(view.waits for view in views.values()):
            return
        hub = self._hosts[0]
        text = f"no progress for {self._idle_s(now):.0f} s: host unreachable: {hub.name}, which has rank 0"
        advice = "what to do: look whether the host runs and can be reached (`trainer doctor`)"
        self.verdict = Verdict((f"{text}, seen from {self._here.name}", advice), hub.ranks)

    def _talk(self, views: dict[int, View], now: float) -> None:
        if not self._links:
            if self._is_done or now < self._next_try:
                return
            self._next_try = now + _AGAIN_S
            self._links.append(connect(self._job.endpoint, self._job.token))
        (link,) = self._links
        for message in link.receive():
            self._obey(link, message)
        if now - link.heard_at > SILENT_S:
            raise TimeoutError(errno.ETIMEDOUT, "the hub is silent")
        if not link.is_proven:
            return
        self._is_lost, self._failures = False, 0
        is_failure = has_failed(views.values())
        if now - self._reported_at >= _REPORT_S or is_failure > self._has_told_failure:
            self._reported_at, self._has_told_failure = now, is_failure
            self._send(link, views)

    def _send(self, link: Link, views: dict[int, View], **more: Any) -> None:
        link.send({"host": self._job.number, "views": [view.as_dict() for view in views.values()], **more})

    def _obey(self, link: Link, message: dict[str, Any]) -> None:
        if message.get("do") == "look":
            self._send(link, self._ranks.views_with_stacks(), looked=True)
        elif message.get("do") == "report":
            self._send(link, self._ranks.views())
        elif message.get("do") == "end":
            self._ranks.end(str(message["said"]), tuple(map(int, message["culprits"])))
        elif message.get("do") == "bye":
            self._is_done = True

    def _lose(self, error: Exception) -> None:
        was_proven = any(link.is_proven for link in self._links)
        for link in self._links:
            link.close()
        self._links.clear()
        # A hub that has ended says so, or closes the connection; a host that is cut off does neither. One that refuses
        # a connection can be reached.
        is_cut_off = self._is_lost or (was_proven and is_timeout(error))
        self._is_lost = is_cut_off and not isinstance(error, ConnectionRefusedError)
        self._failures += 1
        if not self._is_lost and (was_proven or self._failures >= _TRIES):
            self._is_done = True

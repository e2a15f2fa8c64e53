"""The watcher of a host without rank 0: tells the hub what its ranks do, and ends them when the hub says so."""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from typing import Any

from trainer.watch.hub import SILENT_S
from trainer.watch.judge import Host, Verdict, View, is_paused
from trainer.watch.limits import Limit
from trainer.watch.mismatch import has_failed
from trainer.watch.ranks import LocalRanks
from trainer.watch.report import announce, write_stacks
from trainer.watch.wire import Link, RefusedError, connect, is_refusal, is_timeout

_REPORT_S = 1.0
_AGAIN_S, _TRIES = 5.0, 6


class Spoke:
    """Watches the ranks of one host.

    Args:
        hosts: all of the job; the first is the hub's.
        number: which of them is this one.
    """

    def __init__(
        self, hosts: Sequence[Host], number: int, ranks: LocalRanks, endpoint: str, token: str, given_s: float | None,
        script: str,
    ) -> None:  # fmt: skip
        self._hosts, self._number, self._ranks = hosts, number, ranks
        self._endpoint, self._token, self._script = endpoint, token, script
        self._limit = Limit(given_s, time.monotonic())
        self._link: Link | None = None
        self._is_done = self._is_lost = False
        self._reported_at = self._next_try = self._next_look = 0.0
        self._failures = 0
        self._looks = self._has_told_failure = False
        self._end: tuple[str, tuple[int, ...]] | None = None
        self.verdict: Verdict | None = None

    @property
    def readers(self) -> list[Any]:
        return [self._link] if self._link is not None else []

    @property
    def writers(self) -> list[Link]:
        return [self._link] if self._link is not None and self._link.wants_to_write else []

    @property
    def must_end(self) -> bool:
        """Whether the ranks are to be ended."""
        return self._end is not None or self.verdict is not None

    def postpone(self) -> None:
        """Begin to count anew: this host has slept."""
        self._limit.postpone(time.monotonic())
        if self._link is not None:
            self._link.heard_at = time.monotonic()

    def tick(self) -> None:
        """Report to the hub, and do what it says."""
        now = time.monotonic()
        views = self._note(self._ranks.views(), now)
        try:
            self._talk(views, now)
        except (RefusedError, OSError, ValueError) as error:
            self._lose(error)
        if is_paused([self._hosts[self._number]]):
            self._limit.postpone(now)
        elif self._is_lost and now >= self._next_look and self._idle_s(now) > self._limit.seconds + SILENT_S:
            self._next_look = now + SILENT_S
            self._judge(now)

    def _idle_s(self, now: float) -> float:
        return now - self._limit.progress_at

    def _judge(self, now: float) -> None:
        """Blame the host of rank 0 where ranks of this one wait, and none of them has an excuse."""
        views = self._note(self._ranks.views_with_stacks(), now).values()
        if self._idle_s(now) <= self._limit.seconds:  # one has gone on while it was looked at
            return
        has_excuse = any(view.excuse for view in views) and self._idle_s(now) < self._limit.longest
        if has_excuse or not any(view.waits for view in views):
            return
        name, ranks = self._hosts[0].name, self._hosts[0].ranks
        text = f"no progress for {self._idle_s(now):.0f} s: host unreachable: {name}, which has rank 0"
        advice = "what to do: look whether the host runs and can be reached (`trainer doctor`)"
        self.verdict = Verdict((f"{text}, seen from {self._hosts[self._number].name}", advice), ranks)

    def leave(self) -> None:
        """Tell the hub that the ranks of this host have ended."""
        if self._link is not None:
            try:
                self._link.send({"host": self._number, "views": self._dicts(self._ranks.views()), "bye": True})
                self._link.flush_for(0.5)
            except (RefusedError, OSError):
                pass
            self._link.close()

    def end(self) -> None:
        """End the ranks of this host."""
        if self.verdict is not None:
            announce(self.verdict)
            write_stacks(self.verdict, self._hosts, self._script)
            self._ranks.end(self.verdict.first, self.verdict.culprits)
        elif self._end is not None:
            self._ranks.end(*self._end)

    def _note(self, views: dict[int, View], now: float) -> dict[int, View]:
        known = self._hosts[self._number].views
        if any(rank not in known or view.changed_since(known[rank]) for rank, view in views.items()):
            self._limit.on_progress(list(views.values()), now)
        known.update(views)
        return views

    def _talk(self, views: dict[int, View], now: float) -> None:
        if self._link is None:
            if self._is_done or now < self._next_try:
                return
            self._next_try = now + _AGAIN_S
            self._link = connect(self._endpoint, self._token)
        self._link.flush()
        for message in self._link.receive():
            self._obey(message)
        if now - self._link.heard_at > SILENT_S:
            raise TimeoutError(errno.ETIMEDOUT, "the hub is silent")
        if not self._link.is_proven:
            return
        self._is_lost, self._failures = False, 0
        if self._looks:
            self._looks, self._reported_at = False, now
            views = self._ranks.views_with_stacks()
            self._link.send({"host": self._number, "views": self._dicts(views), "looked": True})
        elif now - self._reported_at >= _REPORT_S or has_failed(views.values()) > self._has_told_failure:
            self._reported_at, self._has_told_failure = now, has_failed(views.values())
            self._link.send({"host": self._number, "views": self._dicts(views)})

    def _obey(self, message: dict[str, Any]) -> None:
        if message.get("do") == "look":
            self._looks = True
        elif message.get("do") == "report":
            self._reported_at = 0.0
        elif message.get("do") == "end":
            self._end = (str(message["said"]), tuple(map(int, message["culprits"])))
        elif message.get("do") == "bye":
            self._is_done = True

    def _lose(self, error: Exception) -> None:
        was_proven = self._link is not None and self._link.is_proven
        if self._link is not None:
            self._link.close()
            self._link = None
        # A hub that has ended says so, or closes the connection; a host that is cut off does neither.
        self._is_lost = (self._is_lost or (was_proven and is_timeout(error))) and not is_refusal(error)
        self._failures += 1
        if not self._is_lost and (was_proven or self._failures >= _TRIES):
            self._is_done = True

    @staticmethod
    def _dicts(views: dict[int, View]) -> list[dict[str, Any]]:
        return [view.as_dict() for view in views.values()]

"""The hub: the watcher beside rank 0, which hears all others, judges, and has the job ended."""

from __future__ import annotations

import math
import socket
import time
from contextlib import suppress
from typing import Any

from trainer.cluster.output import say, warn
from trainer.ops.watcher.job import UNREACHABLE, UNWATCHED, Host, Job, View, views_of
from trainer.ops.watcher.judge import Verdict, explain, has_failed, is_paused, judge, notice
from trainer.ops.watcher.ranks import LocalRanks
from trainer.ops.watcher.watcher import SILENT_S, Watcher
from trainer.ops.watcher.wire import BROKEN, TIMEOUT_S, Link, RefusedError, is_timeout
from trainer.watch.job_folder import DIFFERENT, write_verdict

_BEAT_S = 2.0
"""Time between two signs of life to the other watchers."""
_LOOK_S, _AGAIN_S = 6.0, 15.0
"""How long the other watchers have to answer a look, and how long after a look without a verdict the next one is."""
_ANSWER_S = 4.0
"""A watcher that has not answered is silent after this long without a report, of which there is one a second."""
_NOTICE_S = 30.0
"""Where the limit is at least twice as long, it is said after this long what is waited for."""
_MOST_UNPROVEN = 64
_SENT_S = 2.0
_TICK_S = 0.05
_WHY = "trainer: why it failed: "
_SETTLED_S, _LAST_WORDS_S = 0.5, 1.0
"""How long after a failure it may be explained, and how long the other hosts are heard for that."""


class Hub(Watcher):
    """Watches a whole job.

    Where nothing has happened for too long, it has all watchers look at their ranks' stacks, and judges by what they
    have seen. It says long before that what is waited for, and why a job fails whose ranks differ.

    Args:
        listener: for the watchers of the other hosts; None without others.
    """

    def __init__(self, job: Job, ranks: LocalRanks, listener: socket.socket | None) -> None:
        super().__init__(job, ranks)
        now = time.monotonic()
        self._listener = listener
        # Once in each wait it is said what is waited for, and each time after twice as long.
        self._notice_after_s = self._next_notice_s = _NOTICE_S
        self._beat_at, self._warn_at = now, now + SILENT_S
        self._has_explained = self._is_paused = False
        self._failed_at = self._next_look = 0.0
        self._look_until = 0.0
        """When the others have to have answered the look that goes on; 0 where none does."""
        self._here.problem, self._here.heard_at = "", now
        if listener is not None:
            listener.setblocking(False)

    @property
    def sources(self) -> list[Any]:
        return [*self._links, *([self._listener] if self._listener else [])]

    def postpone(self) -> None:
        super().postpone()
        self._look_until = 0.0

    def tick(self) -> None:
        """Hear the others, and judge."""
        now = time.monotonic()
        self._accept()
        for link in list(self._links):
            self._serve(link, now)
        self._take_views(self._here, self._ranks.views())
        self._note_progress(now)
        self._keep_in_touch(now)
        self._explain(now)
        if is_paused(self._hosts):
            if not self._is_paused:
                warn("the job's ranks are stopped; hangs are watched for when they go on")
            self._is_paused = True
            self._limit.progress_at = now
            self._look_until = 0.0
            return
        self._is_paused = False
        self._judge(now)

    def leave(self) -> None:
        """Tell the others that this host's ranks have ended, and end the connections."""
        deadline = time.monotonic() + _LAST_WORDS_S
        self.tick()  # with what the ranks did last
        while self._must_ask and time.monotonic() < deadline:
            time.sleep(_TICK_S)
            self.tick()
        self._explain(time.monotonic(), is_last=True)
        self._tell({"do": "bye"})
        for link in self._links:
            link.flush_for(0.2)
            link.close()

    def _tell_verdict(self, verdict: Verdict) -> None:
        self._tell({"do": "end", "said": verdict.first, "culprits": verdict.culprits})
        deadline = time.monotonic() + _SENT_S
        for link in self._links:
            link.flush_for(max(0.0, deadline - time.monotonic()))

    @property
    def _must_ask(self) -> bool:
        """Whether another host may know why the job has failed, also where the ranks of this one have just ended."""
        may_know = [host for host in self._hosts[1:] if not host.has_left and host.problem != UNREACHABLE]
        return bool(may_know) and not self._has_explained

    def _explain(self, now: float, *, is_last: bool = False) -> None:
        if self._has_explained or not has_failed(views_of(self._hosts).values()):
            return
        if not self._failed_at:
            self._failed_at = now
            self._tell({"do": "report"})
        # Ranks do not fail at the same moment: a majority of those that were seen first may be wrong.
        is_known = all(host.heard_at > self._failed_at for host in self._hosts[1:] if host.can_be_asked)
        is_due = now - self._failed_at > (_SETTLED_S if is_known else _LAST_WORDS_S)
        if (is_due or is_last) and (lines := explain(self._hosts)):
            self._has_explained = True
            say(lines, _WHY)
            write_verdict(DIFFERENT, "; ".join(lines))

    def _judge(self, now: float) -> None:
        idle_s = self._idle_s(now)
        if self._look_until:
            unanswered = [host for host in self._hosts if host.can_be_asked and not host.has_looked]
            if unanswered and now < self._look_until:
                return
            self._look_until = 0.0
            for host in unanswered:
                if now - host.heard_at > _ANSWER_S:
                    host.problem = UNREACHABLE
            self._conclude(now, idle_s)
        elif self._is_look_due(now, idle_s):
            self._look_until = now + _LOOK_S
            for host in self._hosts:
                host.has_looked = host is self._here
            self._tell({"do": "look"})
            self._take_views(self._here, self._ranks.views_with_stacks())

    def _is_look_due(self, now: float, idle_s: float) -> bool:
        if idle_s > self._limit.seconds:
            return now >= self._next_look
        return self._next_notice_s <= idle_s and self._limit.seconds >= 2 * self._notice_after_s

    def _conclude(self, now: float, idle_s: float) -> None:
        """Judge by what a look has shown; before the limit, say what is waited for."""
        excuses = {view.excuse for view in views_of(self._hosts).values()}
        if "debugger" in excuses:
            self._limit.progress_at = now
        elif idle_s > self._limit.seconds:
            self._next_look = now + _AGAIN_S
            verdict = judge(self._hosts, idle_s)
            # Whoever sets the limit knows how long a rank may work by itself.
            is_certain = verdict is not None and (verdict.is_sure or self._job.given_s is not None)
            if (is_certain and "compiles" not in excuses) or idle_s > self._limit.longest:
                self.verdict = verdict
        elif "compiles" not in excuses and (text := notice(self._hosts, idle_s, self._limit.seconds)):
            self._notice_after_s, self._next_notice_s = 2 * self._notice_after_s, math.inf
            say([text])
        else:
            self._next_notice_s = 2 * idle_s

    def _take_views(self, host: Host, views: dict[int, View]) -> None:
        if self._look_until:
            # What was seen of its stack holds until it goes on.
            for rank, view in views.items():
                before = host.views.get(rank)
                if before is not None and not view.stacks and not view.changed_since(before):
                    views[rank] = before.replaced(process=view.process, cpu=view.cpu)
        if self._note(host, views):
            self._next_notice_s = self._notice_after_s
            self._look_until = 0.0

    def _accept(self) -> None:
        if self._listener is None:
            return
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._links.append(Link(connection, self._job.token, is_hub=True))
        unproven = [link for link in self._links if not link.is_proven]
        for link in unproven[: -(_MOST_UNPROVEN + len(self._hosts))]:  # all hosts connect at once
            self._drop(link)

    def _serve(self, link: Link, now: float) -> None:
        try:
            # What a watcher says last is there, also where it takes no more.
            for message in link.receive():
                self._take(link, message, now)
            if not link.is_proven and now - link.opened_at > TIMEOUT_S:
                raise RefusedError("it has not proven anything in time")
        except BROKEN as error:
            self._drop(link, is_lost=is_timeout(error))

    def _take(self, link: Link, message: dict[str, Any], now: float) -> None:
        if link.host < 0:
            number = int(message["host"])
            if number not in range(1, len(self._hosts)):
                raise RefusedError(f"the job has no host {number} beside this one")
            link.host = number
            for earlier in [other for other in self._links if other.host == link.host and other is not link]:
                self._drop(earlier)
        host = self._hosts[link.host]
        host.problem, host.has_left, host.heard_at = "", bool(message.get("bye")), now
        views = map(View.from_dict, message.get("views", ()))
        host.has_looked |= bool(message.get("looked"))
        self._take_views(host, {view.rank: view for view in views})

    def _drop(self, link: Link, *, is_lost: bool = False) -> None:
        if link in self._links:
            self._links.remove(link)
        link.close()
        if link.host >= 0 and not any(other.host == link.host for other in self._links):
            host = self._hosts[link.host]
            if not host.has_left:
                host.problem = UNREACHABLE if is_lost or host.problem == UNREACHABLE else UNWATCHED

    def _tell(self, message: dict[str, Any]) -> None:
        for link in self._links:
            link.send(message)

    def _keep_in_touch(self, now: float) -> None:
        if now - self._beat_at >= _BEAT_S:
            self._beat_at = now
            self._tell({"do": "go on"})
        for link in list(self._links):
            if link.host >= 0 and now - link.heard_at > SILENT_S:
                self._drop(link, is_lost=True)
        if now > self._warn_at:
            self._warn_at = math.inf
            if silent := [host.name for host in self._hosts if not host.heard_at]:
                warn(f"the watcher of {', '.join(silent)} has not connected: hangs there are not watched for")

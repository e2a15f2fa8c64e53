"""The watchers of a job, one on each host: the hub beside rank 0, which hears the others and judges, and its spokes."""

from __future__ import annotations

import errno
import math
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.cluster.output import say, warn
from trainer.files import write_atomically
from trainer.ops.watcher.job import UNREACHABLE, UNWATCHED, Host, Job, View, names_of, views_of
from trainer.ops.watcher.judge import Verdict, explain, has_failed, is_paused, judge, notice
from trainer.ops.watcher.limits import Limit
from trainer.ops.watcher.ranks import LocalRanks
from trainer.ops.watcher.wire import BROKEN, TIMEOUT_S, Link, RefusedError, connect, is_timeout
from trainer.watch.job_folder import DIFFERENT, write_verdict

SILENT_S = 15.0
"""A watcher that was not heard for so long is lost. Hosts whose watcher never was are named after this time."""
_BEAT_S, _REPORT_S = 2.0, 1.0
"""Time between two signs of life of the hub, and between two reports to it."""
_ANSWER_S = 4.0
"""A watcher that has not answered is silent after this long without a report."""
_LOOK_S, _LOOK_AGAIN_S = 6.0, 15.0
"""How long the other watchers have to answer a look, and how long after a look without a verdict the next one is."""
_NOTICE_S = 30.0
"""Where the limit is at least twice as long, it is said after this long what is waited for."""
_SETTLED_S, _LAST_WORDS_S = 0.5, 1.0
"""How long after a failure it may be explained, and how long the other hosts are heard for that."""
_CONNECT_AGAIN_S, _TRIES = 5.0, 6
_MOST_UNPROVEN = 64
_SENT_S = 2.0
_TICK_S = 0.05
_WRITTEN_S = 3.0
_HANG, _WHY = "trainer: hang: ", "trainer: why it failed: "


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
    def sources(self) -> list[Any]:
        """Sockets from which something may come."""
        return [*self._links]

    def postpone(self) -> None:
        """Count the time without progress anew, because this host has slept."""
        now = time.monotonic()
        self._count_anew(now)
        for link in self._links:
            link.heard_at = now

    def end(self) -> None:
        """Print the verdict, and end the ranks of this host."""
        if self.verdict is not None:
            say(self.verdict.lines, _HANG)
            self._tell_verdict(self.verdict)
            write_stacks(self.verdict, self._hosts, self._job.script)
            self._ranks.end(self.verdict.first, self.verdict.culprits)

    def _tell_verdict(self, verdict: Verdict) -> None:
        """Have other hosts end their ranks too."""

    def _count_anew(self, now: float) -> None:
        self._limit.progress_at = now

    def _idle_s(self, now: float) -> float:
        return now - self._limit.progress_at

    def _note(self, host: Host, views: dict[int, View]) -> bool:
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


class Hub(Watcher):
    """Watches a whole job.

    If nothing has happened for too long, it has all watchers look at their ranks' stacks, and judges by what they have
    seen. Long before, it says what is waited for. Of a job that fails, it says which ranks called another collective.

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

    def _count_anew(self, now: float) -> None:
        super()._count_anew(now)
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
            self._count_anew(now)
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
            self._count_anew(now)
        elif idle_s > self._limit.seconds:
            self._next_look = now + _LOOK_AGAIN_S
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
            self._count_anew(now)
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
            self._next_try = now + _CONNECT_AGAIN_S
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


def write_stacks(verdict: Verdict, hosts: Sequence[Host], script: str) -> None:
    """Write the verdict and all stacks into the run's folder, and print where. Takes 3 s at most."""
    places = [f"the ranks' stacks cannot be written: the disk does not answer within {_WRITTEN_S:.0f} s"]

    def write() -> None:
        try:
            places.append(f"every rank's stack is in {_write(verdict, hosts, script)}")
        except OSError as error:
            places.append(f"the ranks' stacks cannot be written: {error.strerror or error}")

    # The file system may be what hangs.
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(_WRITTEN_S)
    say([places[-1]], _HANG)


def _write(verdict: Verdict, hosts: Sequence[Host], script: str) -> Path:
    views, names = views_of(hosts), names_of(hosts)
    record = next((view.folder for view in views.values() if view.folder), "")
    name = f"hang-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(record, name) if record else Path("runs", f"{script}-{name}")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "verdict.txt", "".join(f"{line}\n" for line in verdict.lines))
    for rank, view in views.items():
        write_atomically(folder / f"rank-{rank}.txt", f"{names[rank]}: {_facts(view)}\n\n{view.stacks}")
    return folder


def _facts(view: View) -> str:
    facts = {
        "state": view.state,
        "waits for": view.what,
        **{name: getattr(view, name) for name in ("collectives", "steps", "updates", "elements", "phase", "process")},
        "main thread's share of a processor": round(view.cpu, 2),
    }
    if view.enqueued > 0:
        facts |= {"enqueued": view.enqueued, "completed": view.completed}
    return ", ".join(f"{name} {fact}" for name, fact in facts.items())

"""The watcher of a host: it notes what the ranks do, and judges when nothing has happened for too long."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

from trainer.cluster.output import say, warn
from trainer.files import write_atomically
from trainer.ops.watcher.job import Host, Settings, View
from trainer.ops.watcher.judge import Verdict, explain, has_failed, is_paused, judge, notice
from trainer.ops.watcher.limits import Limit
from trainer.ops.watcher.ranks import LocalRanks
from trainer.watch.job_folder import DIFFERENT, HANG, WAITS, remove_verdict, write_verdict

_LOOK_AGAIN_S = 15.0
"""How long after a look without a verdict the next one is."""
_NOTICE_S = 30.0
"""Where the limit is at least twice as long, it is said after this long what is waited for."""
_SETTLED_S = 0.5
"""How long after a failure it may be explained."""
_WRITTEN_S = 3.0
_HANG, _WHY = "trainer: hang: ", "trainer: why it failed: "


class Watcher:
    """Watches the ranks of one host.

    If none of them has done anything for too long, it looks at their stacks, and judges by what it has seen. Long
    before, it says what is waited for. Of a job that fails, it says which ranks called another collective.
    """

    def __init__(self, settings: Settings, ranks: LocalRanks) -> None:
        self._settings, self._ranks = settings, ranks
        self._host = Host(settings.host)
        self._limit = Limit(settings.given_s, settings.start_s, time.monotonic())
        # Once in each wait it is said what is waited for, and each time after twice as long.
        self._notice_after_s = self._next_notice_s = _NOTICE_S
        self._has_explained = self._is_paused = self._has_noted = False
        self._failed_at = self._next_look = 0.0
        self.verdict: Verdict | None = None

    def postpone(self) -> None:
        """Count the time without progress anew, because this host has slept."""
        self._limit.progress_at = time.monotonic()

    def tick(self) -> None:
        """See what the ranks do, and judge."""
        now = time.monotonic()
        self._take_views(self._ranks.views(), now)
        self._explain(now)
        if is_paused(self._host):
            if not self._is_paused:
                warn(f"the ranks on {self._host.name} are stopped; hangs are watched for when they go on")
            self._is_paused = True
            self._limit.progress_at = now
            return
        self._is_paused = False
        if self._is_look_due(now):
            self._take_views(self._ranks.views_with_stacks(), now)
            if self._is_look_due(now):  # else a rank has gone on while it was looked at
                self._conclude(now)

    def end(self) -> None:
        """Print the verdict, and end the ranks of this host."""
        if (verdict := self.verdict) is not None:
            say(verdict.lines, _HANG)
            write_verdict(HANG, verdict.waits_for or verdict.first, () if verdict.waits_for else verdict.culprits)
            write_stacks(verdict, self._host, self._settings.script)
            self._ranks.end()

    def leave(self) -> None:
        """Say why the job has failed, by what its ranks did last."""
        now = time.monotonic()
        self._take_views(self._ranks.views(), now)
        self._explain(now, is_last=True)

    def _idle_s(self, now: float) -> float:
        return now - self._limit.progress_at

    def _take_views(self, views: dict[int, View], now: float) -> None:
        earlier = self._host.views
        has_moved = any(rank not in earlier or view.changed_since(earlier[rank]) for rank, view in views.items())
        self._host.views = dict(sorted(views.items()))
        self._host.is_whole_job = len(views) == self._settings.size
        if has_moved:
            self._limit.on_progress(views.values(), now)
            self._next_notice_s = self._notice_after_s
            if self._has_noted:
                self._has_noted = False
                remove_verdict()

    def _explain(self, now: float, *, is_last: bool = False) -> None:
        if self._has_explained or not has_failed(self._host.views.values()):
            return
        self._failed_at = self._failed_at or now
        # Ranks do not fail at the same moment: a majority of those that were seen first may be wrong.
        is_due = now - self._failed_at > _SETTLED_S
        if (is_due or is_last) and (lines := explain(self._host)):
            self._has_explained = True
            say(lines, _WHY)
            write_verdict(DIFFERENT, "; ".join(lines))

    def _is_look_due(self, now: float) -> bool:
        idle_s = self._idle_s(now)
        if idle_s > self._limit.seconds:
            return now >= self._next_look
        return self._next_notice_s <= idle_s and self._limit.seconds >= 2 * self._notice_after_s

    def _conclude(self, now: float) -> None:
        """Judge by what a look has shown; before the limit, say what is waited for."""
        idle_s = self._idle_s(now)
        excuses = {view.excuse for view in self._host.views.values()}
        if "debugger" in excuses:
            self._limit.progress_at = now
            return
        verdict = None
        if idle_s > self._limit.seconds:
            self._next_look = now + _LOOK_AGAIN_S
            verdict = judge(self._host, idle_s)
            if verdict is not None and (self._is_certain(verdict, excuses) or idle_s > self._limit.longest):
                self.verdict = verdict
                return
            if verdict is None or not verdict.waits_for:
                return
        self._give_notice(idle_s, excuses)

    def _is_certain(self, verdict: Verdict, excuses: set[str]) -> bool:
        # Whoever sets the limit knows how long a rank may work by itself, but not what happens on another host.
        is_set = self._settings.given_s is not None
        return (verdict.is_sure or is_set) and not verdict.waits_for and "compiles" not in excuses

    def _give_notice(self, idle_s: float, excuses: set[str]) -> None:
        """Say what is waited for, once in each wait."""
        if self._next_notice_s == math.inf:
            return
        ends_s = self._limit.seconds if idle_s <= self._limit.seconds else self._limit.longest
        text = notice(self._host, idle_s, ends_s)
        if "compiles" in excuses or not text:
            self._next_notice_s = 2 * idle_s
            return
        self._notice_after_s, self._next_notice_s = 2 * self._notice_after_s, math.inf
        say([text])
        if (verdict := judge(self._host, idle_s)) is not None and verdict.waits_for:
            self._has_noted = True
            write_verdict(WAITS, verdict.waits_for)


def write_stacks(verdict: Verdict, host: Host, script: str) -> None:
    """Write the verdict and all stacks into the run's folder, and print where. Takes 3 s at most."""
    places = [f"the ranks' stacks cannot be written: the disk does not answer within {_WRITTEN_S:.0f} s"]

    def write() -> None:
        try:
            whose = "every rank's stack" if host.is_whole_job else f"the stack of each rank on {host.name}"
            places.append(f"{whose} is in {_write(verdict, host, script)}")
        except OSError as error:
            places.append(f"the ranks' stacks cannot be written: {error.strerror or error}")

    # The file system may be what hangs.
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(_WRITTEN_S)
    say([places[-1]], _HANG)


def _write(verdict: Verdict, host: Host, script: str) -> Path:
    views = host.views
    record = next((view.folder for view in views.values() if view.folder), "")
    # Hosts may share the disk.
    name = f"hang-{time.strftime('%Y%m%d-%H%M%S')}{'' if host.is_whole_job else f'-{host.name}'}"
    folder = Path(record, name) if record else Path("runs", f"{script}-{name}")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "verdict.txt", "".join(f"{line}\n" for line in verdict.lines))
    for rank, view in views.items():
        write_atomically(folder / f"rank-{rank}.txt", f"{host.names[rank]}: {_facts(view)}\n\n{view.stacks}")
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

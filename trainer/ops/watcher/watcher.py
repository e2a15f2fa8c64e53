"""The watcher of a host: it notes what the ranks do, and judges when nothing has happened for too long."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from pathlib import Path

from trainer.cluster.output import say, warn
from trainer.files import write_atomically
from trainer.ops.verdict import DIFFERENT, HANG, WAITS, JobVerdict, write_verdict
from trainer.ops.watcher.job import Doing, Host, Settings, View
from trainer.ops.watcher.judge import Verdict, explain, judge
from trainer.ops.watcher.ranks import LocalRanks

_LIMIT_S = 540.0
"""The limit where the user has set none: longer than ranks usually work by themselves, as in a checkpoint."""
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
        self._progress_at = time.monotonic()
        # Once in each wait it is said what is waited for, and each time after twice as long.
        self._notice_s = self._look_at_s = _NOTICE_S
        self._has_said = self._is_paused = self._has_explained = False
        self._failed_at = 0.0
        self.verdict: Verdict | None = None

    def tick(self) -> None:
        """See what the ranks do, and judge. To be called once more when they have ended."""
        self._take_views(self._ranks.views())
        self._explain()
        if self._is_look_due():
            self._take_views(self._ranks.views_with_stacks())
            if self._is_look_due():  # else a rank has gone on while it was looked at, or is in a debugger
                self._conclude(time.monotonic() - self._progress_at)

    def _take_views(self, views: dict[int, View]) -> None:
        earlier = self._host.views
        self._host = Host(self._host.name, dict(sorted(views.items())), len(views) == self._settings.size)
        if any(rank not in earlier or view.progress != earlier[rank].progress for rank, view in views.items()):
            self._begin_anew()
            self._is_paused = False
            if self._has_said:
                self._has_said = False
                write_verdict(None)
        doing = {view.doing for view in views.values()}
        if Doing.DEBUGS in doing or doing == {Doing.STOPPED}:
            if not self._is_paused:
                warn(f"the ranks on {self._host.name} are stopped; hangs are watched for when they go on")
            self._is_paused = True
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Count the time without progress from now on."""
        self._progress_at, limit_s = time.monotonic(), self._limit_s
        self._look_at_s = self._notice_s if limit_s >= 2 * self._notice_s else limit_s

    @property
    def _limit_s(self) -> float:
        """How long the ranks may be without progress."""
        if not any(view.steps for view in self._host.views.values()):
            return self._settings.start_s
        return _LIMIT_S if self._settings.given_s is None else self._settings.given_s

    def _explain(self) -> None:
        if self._has_explained or not (lines := explain(self._host)):
            return
        # Ranks do not fail at the same moment: a majority of those that were seen first may be wrong.
        self._failed_at = self._failed_at or time.monotonic()
        if not self._ranks.running or time.monotonic() - self._failed_at > _SETTLED_S:
            self._has_explained = True
            say(lines, _WHY)
            write_verdict(JobVerdict(DIFFERENT, "; ".join(lines)))

    def _is_look_due(self) -> bool:
        return time.monotonic() - self._progress_at >= self._look_at_s

    def _conclude(self, idle_s: float) -> None:
        """Judge by what a look has shown, or say what is waited for."""
        is_over = idle_s >= self._limit_s
        self._look_at_s = idle_s + _LOOK_AGAIN_S if is_over else self._limit_s
        verdict = judge(self._host, idle_s)
        if verdict is None:
            return
        # Whoever sets the limit does not know what happens on another host.
        ends_s = max(self._limit_s, _LIMIT_S) if verdict.waits_for else self._limit_s
        if idle_s >= ends_s:
            self._end(verdict)
        elif not self._has_said and (verdict.culprits or verdict.waits_for):
            self._has_said = True
            self._notice_s *= 2
            say([f"no progress for {idle_s:.0f} s: {verdict.notice}; the limit without progress is {ends_s:.0f} s"])
            if verdict.waits_for:
                write_verdict(JobVerdict(WAITS, verdict.waits_for))

    def _end(self, verdict: Verdict) -> None:
        """Print the verdict, and end the ranks of this host."""
        self.verdict = verdict
        say(verdict.lines, _HANG)
        write_verdict(JobVerdict(HANG, verdict.waits_for or verdict.lines[0], verdict.culprits))
        write_stacks(verdict, self._host, self._settings.script)
        self._ranks.end()


def write_stacks(verdict: Verdict, host: Host, script: str) -> None:
    """Write the verdict and all stacks into the run's folder, and print where. Takes 3 s at most."""
    said = [f"the ranks' stacks cannot be written: the disk does not answer within {_WRITTEN_S:.0f} s"]

    def write() -> None:
        try:
            said.append(f"each rank's stack is in {_write(verdict, host, script)}")
        except OSError as error:
            said.append(f"the ranks' stacks cannot be written: {error.strerror or error}")

    # The file system may be what hangs.
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(_WRITTEN_S)
    say([said[-1]], _HANG)


def _write(verdict: Verdict, host: Host, script: str) -> Path:
    record = next((view.folder for view in host.views.values() if view.folder), "")
    file = f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{host.name}.txt"  # hosts may share the disk
    path = Path(record, file) if record else Path("runs", f"{script}-{file}")
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = ["\n".join(verdict.lines)]
    for rank, view in host.views.items():
        facts = {name: fact for name, fact in asdict(view).items() if fact and name not in ("frames", "stacks")}
        text = ", ".join(f"{name} {fact}" for name, fact in facts.items())
        parts.append(f"rank {rank} on {host.name}: {text}\n\n{view.stacks}")
    write_atomically(path, "\n\n".join(parts))
    return path

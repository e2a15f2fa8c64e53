"""The watcher of one host: what hub and spokes have in common, and how a verdict is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.cluster.output import say
from trainer.files import write_atomically
from trainer.ops.watcher.job import Host, Job, View, names_of, views_of
from trainer.ops.watcher.judge import Verdict
from trainer.ops.watcher.limits import Limit
from trainer.ops.watcher.ranks import LocalRanks
from trainer.ops.watcher.wire import Link

SILENT_S = 15.0
"""A watcher that was not heard for so long is lost. Hosts whose watcher never was are named after this time."""
_HANG = "trainer: hang: "
_WRITTEN_S = 3.0


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
        self._limit.progress_at = now
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

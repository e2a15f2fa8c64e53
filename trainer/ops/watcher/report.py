"""The folder with the ranks' stacks, and the words in front of what a watcher prints."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.cluster.output import say
from trainer.files import write_atomically
from trainer.ops.watcher.job import Host, View, names_of, views_of
from trainer.ops.watcher.judge import Verdict

HANG, WHY = "trainer: hang: ", "trainer: why it failed: "
_WRITTEN_S = 3.0


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
    say([places[-1]], HANG)


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
    names = ["state", "what", "collectives", "steps", "updates", "elements", "phase", "process", "cpu"]
    names += ["enqueued", "completed"] * (view.enqueued > 0)
    facts = {name: getattr(view, name) for name in names}
    labels = {"what": "waits for", "cpu": "main thread's share of a processor"}
    return ", ".join(
        f"{labels.get(name, name)} {round(fact, 2) if name == 'cpu' else fact}" for name, fact in facts.items()
    )

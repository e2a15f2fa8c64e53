"""What a watcher prints, and the folder with the ranks' stacks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainer.watch.judge import Host, Verdict, View

PREFIX, WHY = "trainer: hang: ", "trainer: why it failed: "
_WRITTEN_S = 3.0


def say(lines: Sequence[str]) -> None:
    """Print lines on standard error, with one write."""
    with suppress(OSError):  # nobody reads any more
        os.write(2, "".join(f"{line}\n" for line in lines).encode())


def warn(text: str) -> None:
    """Print a warning."""
    say([f"trainer: WARNING: {text}"])


def announce(verdict: Verdict) -> None:
    """Print the verdict."""
    say([f"{PREFIX}{line}" for line in verdict.lines])


def say_why(lines: Sequence[str]) -> None:
    """Print why the job has failed."""
    say([f"{WHY}{line}" for line in lines])


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
    say([f"{PREFIX}{places[-1]}"])


def _write(verdict: Verdict, hosts: Sequence[Host], script: str) -> Path:
    views = {rank: (host.name, view) for host in hosts for rank, view in host.views.items()}
    folder = _folder(next((view.folder for _, view in views.values() if view.folder), ""), script)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "verdict.txt").write_text("".join(f"{line}\n" for line in verdict.lines))
    for rank, (name, view) in views.items():
        (folder / f"rank-{rank}.txt").write_text(f"rank {rank} on {name}: {_facts(view)}\n\n{view.stacks}")
    return folder


def _folder(record: str, script: str) -> Path:
    when = time.strftime("%Y%m%d-%H%M%S")
    return Path(record, f"hang-{when}") if record else Path("runs", f"{script}-hang-{when}")


def _facts(view: View) -> str:
    facts: Mapping[str, object] = {
        "state": view.state, "waits for": view.what, "collectives": view.collectives, "steps": view.steps,
        "updates": view.updates, "elements": view.elements, "phase": view.phase, "process": view.process,
        "main thread's share of a processor": round(view.cpu, 2),
        **({"enqueued": view.enqueued, "completed": view.completed} if view.enqueued else {}),
    }  # fmt: skip
    return ", ".join(f"{name} {value}" for name, value in facts.items())

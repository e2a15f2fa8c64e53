"""The faults that a rank of a training makes: it ends itself, its launcher or its supervisor, or spoils the machine."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

PLAN, MADE = Path("plan.json"), Path("fault.json")
BALLAST = Path("checkpoints", "ballast")
AT_START = ("import", "init", "checkpoints")
IN_UPDATE = ("before backward", "before step", "after step")
_FILES_CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.listdir", "os.scandir")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which fault a rank makes, and where."""

    fault: str
    rank: int = 0
    place: str = IN_UPDATE[0]
    """One of AT_START or IN_UPDATE."""
    update: int = 0
    number: int = 0
    """Of the call with which a save is killed."""

    def write(self, folder: Path) -> None:
        (folder / PLAN).write_text(json.dumps(asdict(self)))


class Fault:
    """This rank's fault, if it is the one that makes it and nobody has.

    Args:
        rank: this process's.
    """

    def __init__(self, rank: int) -> None:
        plan = Plan(**json.loads(PLAN.read_text()))
        self._plan = plan if plan.rank == rank and not MADE.exists() else None

    def at(self, place: str, update: int = 0) -> None:
        """Make the fault where it is planned for this place."""
        plan = self._plan
        if plan is None or place != plan.place:
            return
        prepare, later = PREPARATIONS.get(plan.fault, (None, 0))
        if prepare is not None and update == plan.update:
            prepare(plan)
        if update == plan.update + later:
            self._plan = None
            FAULTS[plan.fault](plan)


def _note() -> None:
    MADE.write_text(json.dumps({"time": time.monotonic()}))


def _kill(number: signal.Signals) -> Callable[[Plan], None]:
    def kill(plan: Plan) -> None:
        _note()
        os.kill(os.getpid(), number)

    return kill


def _fail(plan: Plan) -> None:
    _note()
    raise RuntimeError("a bug")


def _signal_supervisor(number: signal.Signals) -> Callable[[Plan], None]:
    def send(plan: Plan) -> None:
        supervisor, _ = _ancestors()
        _note()
        supervisor.send_signal(number)

    return send


def _kill_launcher(plan: Plan) -> None:
    _, launcher = _ancestors()
    _note()
    launcher.kill()


def _ancestors() -> tuple[psutil.Process, psutil.Process]:
    """Return the supervisor and the launcher, which is its child."""
    parents = psutil.Process().parents()
    number = next(n for n, parent in enumerate(parents) if parent.cmdline()[1:4] == ["-m", "trainer", "run"])
    return parents[number], parents[number - 1]


def _kill_during_save(plan: Plan) -> None:
    """Kill this rank at a call of the next save, of which there are about ten."""
    calls = 0

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal calls
        if event in _FILES_CALLS and ".partial" in str(arguments[0]):
            calls += 1
            if calls == plan.number:
                _note()
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def _fill_disk(plan: Plan) -> None:
    with BALLAST.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


def _free_disk_and_kill(plan: Plan) -> None:
    BALLAST.unlink()
    _kill(signal.SIGKILL)(plan)


FAULTS: dict[str, Callable[[Plan], None]] = {
    "SIGKILL to a rank": _kill(signal.SIGKILL),
    "SIGSTOP to a rank": _kill(signal.SIGSTOP),
    "exception": _fail,
    "launcher killed": _kill_launcher,
    "supervisor killed": _signal_supervisor(signal.SIGKILL),
    "SIGUSR2 to the supervisor": _signal_supervisor(signal.SIGUSR2),
    "killed during a save": _kill_during_save,
    "killed before the first update": _kill(signal.SIGKILL),
    "disk full, then killed": _free_disk_and_kill,
}
"""By name, what is done at the planned update or, after a preparation, some updates later."""
PREPARATIONS: dict[str, tuple[Callable[[Plan], None], int]] = {
    "disk full, then killed": (_fill_disk, 20)  # a failed save is told of within half a second
}

"""Trials of checkpoints on a disk that fails, in a process that may be killed at any call.

`run` starts a process with the faulty disk. It imports PyTorch once, and forks a child for each trial. Before a trial
there are the checkpoints 1 and 2. The child saves 3 and removes 1, while one thing goes wrong. Then the parent looks
at what is there.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from tests.faults.content import checkpoint_name, is_saved, save
from tests.faults.faulty_disk import Action, Fault, FaultyDisk, build
from trainer.checkpoint.disk.commit import prune, remove_partial
from trainer.checkpoint.disk.committed import find, load, newest
from trainer.errors import DataError, TrainerError

_ROOT = Path(__file__).resolve().parents[2]
_OLD, _NEW = 2, 3
_KEEP = 2
_AT_CALLS = {
    "killed before a call": Fault(action=Action.KILL_BEFORE),
    "killed after a call": Fault(action=Action.KILL_AFTER),
    "power lost before a call, with data that was not synced": Fault(action=Action.LOSE_DATA),
    "power lost before a call, with data and names that were not synced": Fault(action=Action.LOSE_ALL),
    "one call fails with ENOSPC": Fault(action=Action.FAIL, error=errno.ENOSPC),
    "one call fails with EIO": Fault(action=Action.FAIL, error=errno.EIO),
    "disk full from a call on": Fault(action=Action.FAIL_FROM, error=errno.ENOSPC),
    "disk broken (EIO) from a call on": Fault(action=Action.FAIL_FROM, error=errno.EIO),
    "short write": Fault(action=Action.SHORT_WRITE),
}


@dataclass(kw_only=True)
class Outcome:
    """What a trial has shown."""

    fault: str
    """The kind of fault: a line in the table."""
    detail: str
    newest: int | None = None
    """The number of the newest valid checkpoint afterwards."""
    problems: list[str] = field(default_factory=list)

    @property
    def is_new(self) -> bool:
        return self.newest == _NEW


@dataclass(frozen=True)
class _Report:
    """What the child that saved has said before it ended."""

    status: int
    lines: tuple[str, ...]

    @property
    def is_committed(self) -> bool:
        return "committed" in self.lines

    @property
    def error(self) -> str | None:
        return next((line.removeprefix("error ") for line in self.lines if line.startswith("error ")), None)


def run(folder: Path, every: int = 1) -> Iterator[Outcome]:
    """Run trials in their own process, a fault at every call or every so many; yield the outcomes as they come."""
    environment = {**os.environ, "LD_PRELOAD": str(build(folder)), "PYTHONPATH": str(_ROOT)}
    command = [sys.executable, "-m", "tests.faults.trials", str(folder), str(every)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=_ROOT) as process:
        try:
            assert process.stdout
            for line in process.stdout:
                yield Outcome(**json.loads(line))
        finally:
            if sys.exc_info()[0]:
                process.kill()
    assert process.returncode == 0, f"the trials ended with {process.returncode}"


def _prune(folder: Path) -> None:
    prune(folder, find(folder)[:_KEEP])


def _child(folder: Path, fault: Fault, pipe: int) -> None:
    """Save, and say after each step that it is done."""

    def say(text: str) -> None:
        os.write(pipe, f"{text}\n".encode())

    disk = FaultyDisk()
    disk.watch(folder, fault)
    say("begun")
    try:
        save(folder, _NEW)
        say("committed")
        _prune(folder)
        say("pruned")
        with suppress(OSError):
            os.close(os.open(folder, os.O_RDONLY))  # counted, so that something can go wrong when all is done
        say("calls " + " ".join(disk.calls()))
    except TrainerError as error:
        say(f"error {error}")
    except BaseException:
        say(traceback.format_exc())


class Trials:
    """The trials, with the checkpoints that they begin with."""

    def __init__(self, folder: Path) -> None:
        self._before, self._folder = folder / "before", folder / "trial"
        for number in (1, 2):
            save(self._before, number)

    def run(self, every: int) -> Iterator[Outcome]:
        report = self._save(Fault(action=Action.COUNT))
        calls = next(line for line in report.lines if line.startswith("calls ")).split()[1:]
        for name, fault in _AT_CALLS.items():
            for at, call in enumerate(calls, 1):
                is_tried = call == "write" if fault.action == Action.SHORT_WRITE else at % every == 0
                if is_tried:
                    yield self._fault(name, Fault(action=fault.action, at=at, error=fault.error), call)

    def _save(self, fault: Fault) -> _Report:
        """Save in a child, and return what it said."""
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(self._before, self._folder)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                _child(self._folder, fault, writing)
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:  # noqa: PTH123 -- a file descriptor has no path
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        return _Report(os.waitstatus_to_exitcode(status), tuple(said.decode().splitlines()))

    def _fault(self, name: str, fault: Fault, call: str) -> Outcome:
        report = self._save(fault)
        outcome = Outcome(fault=name, detail=f"{fault} ({call})")
        is_death = fault.action in (Action.KILL_BEFORE, Action.KILL_AFTER, Action.LOSE_DATA, Action.LOSE_ALL)
        if report.status != (-signal.SIGKILL if is_death else 0):
            outcome.problems.append(f"the process ended with {report.status}")
        if fault.action == Action.SHORT_WRITE and "pruned" not in report.lines:
            outcome.problems.append(f"a short write was not completed: {report.lines}")
        _check_error(outcome, fault, report)
        if fault.action == Action.FAIL and report.error and not report.is_committed:
            self._check(outcome, {_OLD}, {1, _OLD})
        else:
            self._check(outcome, *_allowed(report))
        return outcome

    def _check(self, outcome: Outcome, allowed: set[int], kept: set[int]) -> None:
        """Check which checkpoint is the newest, that nothing else was touched, and that training can go on."""
        bad: list[str] = []
        checkpoint = newest(self._folder, bad.append)
        outcome.newest = checkpoint.facts["number"] if checkpoint else None
        if checkpoint is None or outcome.newest not in allowed:
            outcome.problems.append(f"the newest is {outcome.newest} and not one of {sorted(allowed)}")
        elif not is_saved(checkpoint, outcome.newest):
            outcome.problems.append(f"{checkpoint.path.name} holds something else")
        if bad:
            outcome.problems.append(f"named as damaged: {bad}")
        visible = {path.name for path in find(self._folder)}
        for name in visible | {checkpoint_name(number) for number in kept}:
            try:
                load(self._folder / name)
            except DataError as error:
                outcome.problems.append(f"an older one was touched: {error}")
        if not outcome.problems:
            self._check_next(outcome)

    def _check_next(self, outcome: Outcome) -> None:
        assert outcome.newest
        numbers = (outcome.newest, outcome.newest + 1)
        remove_partial(self._folder)
        save(self._folder, numbers[1])
        _prune(self._folder)
        left = sorted(path.name for path in self._folder.iterdir())
        if left != [checkpoint_name(number) for number in numbers]:
            outcome.problems.append(f"the next save left {left}")
        elif not is_saved(load(self._folder / left[1]), numbers[1]):
            outcome.problems.append("the next save saved something else")


def _allowed(report: _Report) -> tuple[set[int], set[int]]:
    """Return which checkpoint may be the newest, and which ones must be there, after what the child has said."""
    return ({_NEW}, {_OLD, _NEW}) if report.is_committed else ({_OLD, _NEW}, {1, _OLD})


def _check_error(outcome: Outcome, fault: Fault, report: _Report) -> None:
    """An error is one line of a TrainerError, with the cause."""
    for line in report.lines:
        if line.split()[0] not in ("begun", "committed", "pruned", "calls", "error"):
            outcome.problems.append(f"a traceback or a second line: {' / '.join(report.lines)}")
            return
    if fault.error and report.error and os.strerror(fault.error) not in report.error:
        outcome.problems.append(f"the error does not have the cause: {report.error}")


def main() -> None:
    torch.set_num_threads(1)  # a process is forked that has no other threads
    for outcome in Trials(Path(sys.argv[1])).run(int(sys.argv[2])):
        print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()

"""Trials of `trainer run`: a training with one fault, which has to end with the weights of one without any."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.distributed.harness import kill_job, marked_environment, processes_of
from tests.faults import lineage
from tests.faults.job import CHECKPOINTS, EPOCHS, LOG, SAMPLES, SAVE_EVERY, UPDATES, WEIGHTS
from tests.faults.job_faults import AT_START, FAULTS, IN_UPDATE, MADE, PREPARATIONS, Plan

LAUNCHERS = ("mpi", "gloo", "torchrun")
NO_FAULT = "none"
TIMEOUT_S = 15
"""What `trainer run` gets as --timeout where a rank is stopped: longer than a start on a machine that is busy."""
RANKS = 2
_DEADLINE_S = 120.0
_GONE_S = 2.0
_DISK = "size=4m"
_CALLS_OF_A_SAVE = 10
# How the first call of `trainer run` ends where it does not go on to the end of the training.
_FIRST_CODES = {"supervisor killed": -signal.SIGKILL, "SIGUSR2 to the supervisor": 75}


@dataclass
class Trial:
    """What came of a fault."""

    launcher: str
    plan: Plan
    folder: str = ""
    problems: list[str] = field(default_factory=list)
    """All that was not right; empty for a trial that ended right."""
    is_lost: bool = False
    """Whether a sample was trained never or twice, or the weights are not those of a training without a fault."""
    left: int = 0
    """Processes that were left."""
    recovery_s: float | None = None
    """From the fault to the first update after it."""


def draw(fault: str, launcher: str, rng: random.Random) -> Trial:
    """Return a trial with a random place of the fault."""
    _, later = PREPARATIONS.get(fault, (None, 0))
    is_at_start = fault == "killed before the first update"
    plan = Plan(
        fault=fault,
        # One rank of a host writes.
        rank=0 if fault == "killed during a save" else rng.randrange(RANKS),
        place=rng.choice(AT_START if is_at_start else IN_UPDATE),
        # With a preparation, such as a full disk, not before a checkpoint is there for certain: the second has begun.
        update=0 if is_at_start else rng.randint(8 if later else 1, UPDATES - 8 - later),
        number=rng.randint(1, _CALLS_OF_A_SAVE),
    )
    return Trial(launcher, plan)


class Trials:
    """Runs trials in folders of their own.

    Args:
        folder: where they are made. That of a trial which has ended right is removed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # The sum of two ranks is the same to the last bit, whatever carries it.
        self._expected: Mapping[str, torch.Tensor] = {}
        self._count = 0

    def run(self, trial: Trial) -> Trial:
        """Run a trial and note in it what came of it."""
        if not self._expected:
            self._expected = self._uninterrupted(trial.launcher)
        self._count += 1
        folder = self._folder / f"{self._count:03d}-{trial.plan.fault.replace(' ', '-')}-{trial.launcher}"
        trial.folder = str(folder)
        with _prepared(folder, trial.plan):
            codes = _start(folder, trial)
            trial.left = _end(folder)
            self._check(trial, folder, codes)
        if not trial.problems:
            shutil.rmtree(folder)
        return trial

    def _uninterrupted(self, launcher: str) -> Mapping[str, torch.Tensor]:
        trial = Trial(launcher, Plan(fault=NO_FAULT, rank=-1))
        folder = self._folder / f"uninterrupted-{launcher}"
        with _prepared(folder, trial.plan):
            codes = _start(folder, trial)
            if codes != [0] or _end(folder):
                raise RuntimeError(f"a training without a fault has failed; see {folder / 'output'}")
            return _weights(folder)

    def _check(self, trial: Trial, folder: Path, codes: Sequence[int]) -> None:
        first = _FIRST_CODES.get(trial.plan.fault)
        expected = [0] if first is None else [first, 0]
        if list(codes) != expected:
            trial.problems.append(f"trainer run has ended with {list(codes)} instead of {expected}")
        if trial.left:
            trial.problems.append(f"{trial.left} processes were left")
        if list((folder / "tmp").glob("trainer-*")):
            trial.problems.append("status files were left")
        if not (folder / MADE).exists():
            trial.problems.append("the fault was not made")
            return
        lost = _problems_of_training(folder, self._expected)
        trial.is_lost = bool(lost)
        trial.problems += lost
        if not lost:
            self._measure(trial, folder)

    def _measure(self, trial: Trial, folder: Path) -> None:
        starts = lineage.read(folder / LOG)
        made_s = json.loads((folder / MADE).read_text())["time"]
        after = [start for start in starts if start.time > made_s and start.first_update_s is not None]
        attempts = _attempts(folder)
        if len(after) != 1 or len(attempts) != (1 if trial.plan.fault in _FIRST_CODES else 2):
            trial.problems.append(f"{len(after)} starts after the fault, {len(attempts)} attempts; one was enough")
        if after and after[0].first_update_s is not None:
            trial.recovery_s = after[0].first_update_s - made_s
        trial.problems += _problems_of_fault(trial.plan, folder, starts)


def _problems_of_training(folder: Path, expected: Mapping[str, torch.Tensor]) -> list[str]:
    try:
        problems = lineage.problems(lineage.read(folder / LOG), EPOCHS, SAMPLES, UPDATES)
        weights = _weights(folder)
    except (OSError, ValueError) as error:
        return [f"the training cannot be judged: {error}"]
    if not all(torch.equal(weights[name], tensor) for name, tensor in expected.items()):
        problems.append("the weights are not those of a training without a fault")
    return problems


def _problems_of_fault(plan: Plan, folder: Path, starts: Sequence[lineage.Start]) -> list[str]:
    if plan.fault != "disk full, then killed":
        return []
    output = (folder / "output").read_text(errors="replace")
    problems = [] if "earlier checkpoints are kept" in output else ["nothing was said of the full disk"]
    resumed = starts[-1].resumed
    _, later = PREPARATIONS[plan.fault]
    # The last save before the end may still be going on when the disk is freed.
    if resumed is None or plan.update < int(resumed.rpartition("-")[2]) <= plan.update + later - SAVE_EVERY:
        problems.append(f"it went on from {resumed}, which the full disk had no room for")
    return problems


def _weights(folder: Path) -> Mapping[str, torch.Tensor]:
    weights: Mapping[str, torch.Tensor] = torch.load(folder / WEIGHTS, weights_only=True)
    return weights


def _attempts(folder: Path) -> list[dict[str, Any]]:
    """Return the attempts of the last call."""
    path = next((folder / "runs").glob("*/events.jsonl"))
    events = [json.loads(line) for line in path.read_text().splitlines()]
    last = max((number for number, event in enumerate(events) if event.get("attempt") == 1), default=0)
    return [event for event in events[last:] if "recovery_s" in event]


@contextmanager
def _prepared(folder: Path, plan: Plan) -> Iterator[None]:
    """Context in which the folder of a trial is there; a disk that is to be full is a small one of its own."""
    checkpoints = folder / CHECKPOINTS
    checkpoints.mkdir(parents=True)
    plan.write(folder)
    has_disk = plan.fault == "disk full, then killed"
    if has_disk:
        subprocess.run(["mount", "-t", "tmpfs", "-o", _DISK, "tmpfs", str(checkpoints)], check=True)
    try:
        yield
    finally:
        kill_job(str(folder))
        if has_disk:
            subprocess.run(["umount", "--lazy", str(checkpoints)], check=True)


def _start(folder: Path, trial: Trial) -> list[int]:
    """Call `trainer run`, and once more where the fault has ended it; return the exit codes."""
    codes = [_call(folder, trial)]
    if codes[0] == _FIRST_CODES.get(trial.plan.fault):
        codes.append(_call(folder, trial))
    return codes


def _call(folder: Path, trial: Trial) -> int:
    timeout = ("--timeout", str(TIMEOUT_S)) if trial.plan.fault == "SIGSTOP to a rank" else ()
    command = ("-np", str(RANKS), f"--{trial.launcher}", *timeout, "--name", "trial")
    with (folder / "output").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer", "run", *command, sys.executable, "-m", "tests.faults.job"],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=marked_environment(folder),
        )  # fmt: skip
    with suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=_DEADLINE_S)
    process.kill()
    process.wait()
    return 124


def _end(folder: Path) -> int:
    """End what is left of a job; return how many processes that were. One that is killed takes a moment to go."""
    _, left = psutil.wait_procs(processes_of(str(folder)), timeout=_GONE_S)
    kill_job(str(folder))
    return len(left)


def faults() -> list[str]:
    """Return the faults that can be made here."""
    return [fault for fault in FAULTS if fault != "disk full, then killed" or os.geteuid() == 0]

"""Real processes through the real launchers, for tests: a deadline, every rank's stack, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
BIN = Path(sys.executable).parent
# Every process of a job inherits this variable, so that all of them can be found again.
MARK = "TRAINER_TEST_JOB"
# What a launcher sets, and what the library sets for Horovod: a job starts without either.
_INHERITED = ("OMPI_", "PMIX_", "HOROVOD_", "OPAL_", "OMP_NUM_THREADS", "MALLOC_", "RANK", "WORLD_SIZE", "LOCAL_RANK")

LAUNCHERS = ("horovodrun-mpi", "horovodrun-gloo", "torchrun", "mpirun")


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    code: int
    output: str
    """stdout and stderr of all ranks, as the launcher merged them."""
    seconds: float
    timed_out: bool = False
    stacks: Mapping[str, str] = field(default_factory=dict)
    """Every rank's stack where the job ran into its deadline."""


def command_for(launcher: str, ranks: int, script: Sequence[str]) -> list[str]:
    """The command line that starts `script` (a Python script or `-m module`, with arguments) on `ranks` ranks."""
    python = str(BIN / "python")
    if launcher == "python":
        return [python, *script]
    if launcher == "torchrun":
        return [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(ranks), *script]
    if launcher == "mpirun":
        return [
            *[str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"],
            *["-np", str(ranks), python, *script],
        ]
    controller = launcher.removeprefix("horovodrun-")
    return [
        *[str(BIN / "horovodrun"), f"--{controller}", "-np", str(ranks), "-H", f"localhost:{ranks}"],
        *[python, *script],
    ]


def run_job(
    launcher: str,
    ranks: int,
    script: Sequence[str],
    *,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> Outcome:
    """Runs a job to its end or to its deadline; afterwards none of its processes is left."""
    with tempfile.TemporaryDirectory(prefix="trainer-job-") as folder:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_INHERITED)}
        environment |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", MARK: folder, "PYTHONUNBUFFERED": "1"}
        environment |= {"TRAINER_TEST_STACKS_AFTER_S": str(timeout_s - 10), **(env or {})}
        log = Path(folder, "output")
        started = time.monotonic()
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command_for(launcher, ranks, script),
                stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env=environment, cwd=cwd,
            )  # fmt: skip
            try:
                code, timed_out = process.wait(timeout=timeout_s), False
            except subprocess.TimeoutExpired:
                code, timed_out = 124, True
            finally:
                kill_job(folder)
                process.wait()
        seconds = time.monotonic() - started
        stacks = {path.name: path.read_text() for path in sorted(Path(folder).glob("stack-*"))}
        return Outcome(code, log.read_text(errors="replace"), seconds, timed_out, stacks)


def processes_of(mark: str) -> list[psutil.Process]:
    """The processes that carry a job's mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def kill_job(mark: str) -> None:
    """Ends every process of a job; mpirun's ranks are in process groups of their own."""
    for process in processes_of(mark):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


@dataclass(frozen=True)
class Checks:
    """What the check functions of a module did on every rank of one job."""

    outcome: Outcome
    by_rank: list[dict[str, str]]
    """Per rank, each check's name with "passed" or its traceback."""


def run_checks(module: str, launcher: str, ranks: int, *, strategy: str = "auto", timeout_s: float = 180.0) -> Checks:
    """Runs every `check_*` function of `module`, in its order, on all ranks of one job.

    One job for many checks, because starting PyTorch on every rank takes longer than a check does.
    """
    with tempfile.TemporaryDirectory(prefix="trainer-checks-") as folder:
        script = ["-m", "tests.distributed.worker", module, strategy, folder]
        outcome = run_job(launcher, ranks, script, timeout_s=timeout_s)
        by_rank = []
        for rank in range(ranks):
            report = Path(folder, f"rank-{rank}.jsonl")
            lines = report.read_text().splitlines() if report.exists() else []
            by_rank.append({entry["check"]: entry["outcome"] for entry in map(json.loads, lines)})
        return Checks(outcome, by_rank)

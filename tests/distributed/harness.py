"""Real processes through the real launchers, for tests: a deadline, every rank's stack, and nothing left behind."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import benchmarks  # noqa: F401 (with it, what follows is found, in ranks too)
from measuring import processes_with

ROOT = Path(__file__).resolve().parent.parent.parent
BIN = Path(sys.executable).parent
# Every process of a job inherits this variable, so that all of them can be found again.
MARK = "TRAINER_TEST_JOB"
# What a launcher sets, and what the library sets for Horovod: a job starts without either.
_INHERITED = ("OMPI_", "PMIX_", "HOROVOD_", "OPAL_", "OMP_NUM_THREADS", "MALLOC_", "RANK", "WORLD_SIZE", "LOCAL_RANK")

_STACK_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    code: int
    output: str
    """stdout and stderr of all ranks, as the launcher merged them."""
    timed_out: bool = False
    stacks: Mapping[int, str] = field(default_factory=dict)
    """Every rank's stack where the job hung."""


def program(name: str) -> str:
    """Return where a launcher is: beside this Python, or on the PATH."""
    return str(BIN / name) if (BIN / name).exists() else shutil.which(name) or name


def python_path(*folders: Path) -> str:
    """Return the PYTHONPATH of a job: what makes its ranks start sooner, these folders, and the caller's own."""
    lighter = [ROOT / "tests" / "lighter"] if "TRAINER_TEST_LIGHTER" in os.environ else []
    own = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([*map(str, [*lighter, *folders]), *own])


def command_for(launcher: str, ranks: int, script: Sequence[str], python: str = sys.executable) -> list[str]:
    """The command line that starts `script` (a Python script or `-m module`, with arguments) on `ranks` ranks."""
    if launcher == "python":
        return [python, *script]
    if launcher == "torchrun":
        start = [program("torchrun"), "--standalone", "--nproc-per-node", str(ranks)]
        return [*start, *script] if python == sys.executable else [*start, "--no-python", python, *script]
    if launcher in ("srun", "srun-without-pmix"):
        mpi = "pmix" if launcher == "srun" else "none"
        return ["srun", "-n", str(ranks), "--overcommit", f"--mpi={mpi}", python, *script]
    if launcher == "mpirun":
        return [
            *[program("mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"],
            *["--mca", "plm", "isolated"],  # else it wants ssh, also for this host
            *["-np", str(ranks), python, *script],
        ]
    controller = launcher.removeprefix("horovodrun-")
    return [
        *[program("horovodrun"), f"--{controller}", "-np", str(ranks), "-H", f"localhost:{ranks}"],
        *[python, *script],
    ]


def run_job(
    launcher: str,
    ranks: int,
    script: Sequence[str],
    *,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Outcome:
    """Run a job to its end or to its deadline; afterwards none of its processes is left."""
    with tempfile.TemporaryDirectory(prefix="trainer-job-") as folder:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_INHERITED)}
        # What launchers and libraries leave in the folder for temporary files goes with the job's own.
        environment |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", MARK: folder, "TMPDIR": folder}
        environment |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": python_path()}
        log = Path(folder, "output")
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command_for(launcher, ranks, script, python),
                stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env=environment | dict(env or {}),
                cwd=ROOT,
            )  # fmt: skip
            stacks: Mapping[int, str] = {}
            try:
                code: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code, stacks = None, _collect_stacks(Path(folder))
            finally:
                kill_job(folder)
                process.wait()
        output = log.read_text(errors="replace")
        return Outcome(124 if code is None else code, output, timed_out=code is None, stacks=stacks)


def marked_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a command whose processes carry the folder's mark, with temporary files in it."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "OMPI_"))}
    return inherited | {
        MARK: str(folder), "TMPDIR": str(folder / "tmp"), "PYTHONPATH": python_path(ROOT),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip


def on_two_hosts(job: str) -> list[str]:
    """Return the command of a job of torchrun on two hosts; the second is this host with its own process IDs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    node = f"{program('torchrun')} --nnodes 2 --nproc-per-node 1 --rdzv-backend static --master-addr 127.0.0.1"
    node += f" --master-port {port} --node-rank"
    both = f"{node} 0 {job} & unshare --pid --fork --mount-proc {node} 1 {job}; code=$?; wait $! && exit $code"
    return ["sh", "-c", both]


def wait_until(is_so: Callable[[], object], seconds: float, why: Callable[[], str]) -> None:
    """Wait until something is so; after so many seconds, fail with what `why` returns."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, why()
        time.sleep(0.1)


def leave_stacks_on_request(rank: int) -> None:
    """Make this rank write its stack on SIGUSR1 to where `run_job` looks for it."""
    file = Path(os.environ[MARK], f"stack-{rank}-{os.getpid()}").open("w")  # noqa: SIM115 (open until the rank ends)
    faulthandler.register(signal.SIGUSR1, file=file)


def _collect_stacks(folder: Path) -> dict[int, str]:
    """Have every rank write its stack."""
    files = sorted(folder.glob("stack-*"))
    for file in files:
        with suppress(ProcessLookupError):
            os.kill(int(file.name.split("-")[2]), signal.SIGUSR1)
    deadline, sizes = time.monotonic() + _STACK_TIMEOUT_S, [0]
    while (0 in sizes or sizes != [file.stat().st_size for file in files]) and time.monotonic() < deadline:
        sizes = [file.stat().st_size for file in files]
        time.sleep(0.1)  # a stack of several threads is written in several pieces
    return {int(file.name.split("-")[1]): file.read_text() for file in files}


def processes_of(mark: str) -> list[psutil.Process]:
    """Return the running processes that carry a job's mark."""
    return processes_with(MARK, mark)


def kill_job(mark: str) -> None:
    """Kill every process of a job; mpirun's ranks are in process groups of their own."""
    for process in processes_of(mark):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def checks_in(modules: Sequence[str]) -> dict[str, str]:
    """Return the modules of `check_*` functions by their names; "module.check_name" stands for that one alone."""
    modules_of: dict[str, str] = {}
    for entry in modules:
        module, _, only = entry.partition(".check_")
        names = [f"check_{only}"] if only else vars(importlib.import_module(module))
        modules_of |= {name: module for name in names if name.startswith("check_")}
    return modules_of


@dataclass(frozen=True)
class Checks:
    """What the check functions did on every rank of one job."""

    outcome: Outcome
    names: list[str]
    """All checks, in the order in which they run."""
    by_rank: list[dict[str, str]]
    """Per rank, each check's name with "passed" or its traceback; a failed check ends the job."""

    @property
    def passed(self) -> set[str]:
        """The checks that passed on all ranks."""
        return {name for name in self.names if all(report.get(name) == "passed" for report in self.by_rank)}

    @property
    def ended_by(self) -> str | None:
        """The first check that did not pass on all ranks; None where all passed. Those behind it did not run."""
        return next((name for name in self.names if name not in self.passed), None)

    def failures(self, check: str) -> list[str]:
        """Return what kept a check from passing, rank by rank, with all that is known of it; empty where it passed."""
        failures = [
            f"rank {rank}: {report.get(check, 'did not get this far')}"
            for rank, report in enumerate(self.by_rank)
            if report.get(check) != "passed"
        ]
        stacks = [f"stack of rank {rank}:\n{stack}" for rank, stack in self.outcome.stacks.items()]
        return [*failures, *stacks, self.outcome.output[-3000:]] if failures else []


def run_checks(
    modules: str | Sequence[str],
    launcher: str,
    ranks: int,
    *,
    strategy: str = "auto",
    device: str = "cpu",
    timeout_s: float = 240.0,
    env: Mapping[str, str] | None = None,
) -> Checks:
    """Run the checks of these modules, in their order, on all ranks of one job.

    One job for many checks, because starting PyTorch on every rank takes longer than a check does.
    """
    modules_of = checks_in([modules] if isinstance(modules, str) else modules)
    with tempfile.TemporaryDirectory(prefix="trainer-checks-") as folder:
        script = ["-m", "tests.distributed.worker", strategy, device, folder]
        script += [f"{module}:{name}" for name, module in modules_of.items()]
        # Ranks find what the tests find by pytest's `pythonpath`.
        path = {"PYTHONPATH": python_path(ROOT / "scripts")}
        outcome = run_job(launcher, ranks, script, timeout_s=timeout_s, env=path | dict(env or {}))
        by_rank = []
        for rank in range(ranks):
            report = Path(folder, f"rank-{rank}.jsonl")
            lines = report.read_text().splitlines() if report.exists() else []
            by_rank.append({entry["check"]: entry["outcome"] for entry in map(json.loads, lines)})
        return Checks(outcome, list(modules_of), by_rank)

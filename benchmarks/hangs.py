"""Hangs, made for real: what `trainer` says of each under each strategy, and after how many seconds.

    python -m benchmarks.hangs --strategies ddp ring --faults sleeps stopped

A job of three ranks trains, and its rank 1 makes the fault in step 11. For "cut-off" it is one of two ranks on two
network namespaces with names of their own, of which the second loses its network; this needs root.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.two_hosts import horovodrun_on_both, hosts, torchrun_on_both
from tests.distributed.harness import BIN, MARK, ROOT, command_for, kill_job, processes_of

JOB = str(ROOT / "benchmarks" / "hang_job.py")
STRATEGIES = {
    "horovod over MPI": ("horovodrun-mpi", "horovod"),
    "horovod over Gloo": ("horovodrun-gloo", "horovod"),
    "ddp": ("torchrun", "ddp"),
    "ring": ("horovodrun-mpi", "ring"),
    "parameter_server": ("torchrun", "parameter_server"),
}
FAULTS = ("sleeps", "spins", "backward", "stopped", "loader", "skips", "one-too-many", "shape", "exits", "cut-off")
TIMEOUT_S = 90.0
_INHERITED = ("OMPI_", "PMIX_", "HOROVOD_", "OPAL_", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TRAINER_")


@dataclass(frozen=True)
class Trial:
    """What was seen of one job."""

    code: int | None
    """None where it had to be killed."""
    output: str
    verdicts: tuple[str, ...]
    """First lines of the verdicts."""
    seconds: float | None
    """From the fault to the verdict."""
    left: tuple[str, ...] = ()
    """Processes that were there 10 s after the launcher had ended."""

    @property
    def culprits(self) -> list[int]:
        """Ranks that the first verdict names."""
        if not self.verdicts:
            return []
        named = self.verdicts[0].partition(" did not come to ")[0].partition(" wait in different ")[0]
        return [int(number) for number in re.findall(r"\d+", named.partition(": ")[2].partition(" on ")[0])]

    @property
    def blamed(self) -> list[int]:
        """Ranks that a job which has ended with an error names."""
        why = re.findall(r"trainer: why it failed: rank (\d+) on", self.output)
        return [
            int(number) for number in why or re.findall(r"the parameter server ended the job: rank (\d+)", self.output)
        ]

    def __str__(self) -> str:
        if self.blamed:
            return "error" if self.blamed == [1] else f"error (names {self.blamed})"
        if self.verdicts:
            right = "" if self.culprits == [1] else f" (names {self.culprits})"
            return f"{self.seconds:.0f} s{right}" if self.seconds is not None else "verdict"
        if self.code is None:
            return "**hangs**"
        return f"exit code {self.code}" if self.code else "ends well"


def run_trial(
    strategy: str, fault: str, hang_timeout_s: float, extra: Sequence[str] = (), env: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Trial:  # fmt: skip
    """Run one job to its end.

    Args:
        extra: further options of the job's script.
        env: what its environment has beside.
    """
    launcher, name = STRATEGIES[strategy]
    arguments = [JOB, fault, "--strategy", name, "--hang-timeout", str(hang_timeout_s), *extra]
    with tempfile.TemporaryDirectory(prefix="trainer-hang-") as folder:
        place: AbstractContextManager[dict[str, str]] = nullcontext({})
        if fault == "cut-off":
            place = hosts(Path(folder, "hosts"))
        environment = {key: value for key, value in os.environ.items() if not key.startswith(_INHERITED)}
        environment |= {MARK: folder, "TMPDIR": folder, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        environment |= env or {}
        with place as more:
            environment |= more
            environment["PATH"] = f"{BIN}{os.pathsep}{environment['PATH']}"
            commands = [command_for(launcher, 3, arguments)] if not more else _on_two_hosts(launcher, arguments)
            return _watch(commands, environment, folder, timeout_s)


def _on_two_hosts(launcher: str, arguments: Sequence[str]) -> list[list[str]]:
    if launcher == "torchrun":
        return [[*command, *arguments] for command in torchrun_on_both(1)]
    controller = launcher.removeprefix("horovodrun-")
    return [[*horovodrun_on_both(1, f"--{controller}"), sys.executable, *arguments]]


def _watch(commands: Sequence[Sequence[str]], environment: dict[str, str], folder: str, timeout_s: float) -> Trial:
    log = Path(folder, "log")
    seen_at: dict[str, float] = {}
    with log.open("wb") as sink:
        processes = [
            subprocess.Popen(one, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env=environment,
                             cwd=folder)
            for one in commands
        ]  # fmt: skip
        deadline = time.monotonic() + timeout_s
        goes_on = True
        while goes_on:
            # Asked before the log is read, so that what comes with the end is seen as well.
            goes_on = any(one.poll() is None for one in processes) and time.monotonic() < deadline
            text = log.read_text(errors="replace")
            for word in ("fault ", "hang: no progress"):
                if word in text:
                    seen_at.setdefault(word, time.monotonic())
            time.sleep(0.1)
        codes = [one.poll() for one in processes]
        left = _left(folder)
        kill_job(folder)
        for one in processes:
            one.wait()
    output = log.read_text(errors="replace")
    seconds = seen_at["hang: no progress"] - seen_at["fault "] if len(seen_at) == 2 else None
    code = None if None in codes else max(codes, key=abs)  # type: ignore[arg-type]
    return Trial(code, output, tuple(re.findall(r"trainer: hang: (no progress .*)", output)), seconds, left)


def _left(folder: str) -> tuple[str, ...]:
    _, left = psutil.wait_procs(processes_of(folder), timeout=10.0)
    return tuple(" ".join(one.cmdline()) for one in left)


def main() -> None:
    """Run the trials, and print each as it ends, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--hang-timeout", type=float, default=5.0)
    args = parser.parse_args()
    results: dict[tuple[str, str], Trial] = {}
    for fault in args.faults:
        for strategy in args.strategies:
            trial = results[fault, strategy] = run_trial(strategy, fault, args.hang_timeout)
            print(f"{fault}, {strategy}: {trial}; {' | '.join(trial.verdicts) or trial.code}", flush=True)
    print(f"\n| fault | {' | '.join(args.strategies)} |\n|---{'|---' * len(args.strategies)}|")
    for fault in args.faults:
        print(f"| {fault} | {' | '.join(str(results[fault, strategy]) for strategy in args.strategies)} |")


if __name__ == "__main__":
    main()

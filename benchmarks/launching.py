"""Runs a contestant's processes so that nothing of them outlives the benchmark."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

ROOT = Path(__file__).resolve().parent.parent
_GRACE_S = 5.0
_LAST_WORDS = 4000
_MARK = "TRAINER_BENCHMARK_RUN"
# horovodrun marks every piece of output with the rank that it came from.
_RANK_MARK = re.compile(r"\[\d+,\d+\]<std(?:out|err)>:")
# What would set up "Horovod as it comes" after all, or give the ranks a GPU.
_FOREIGN_SETTINGS = ("HOROVOD_", "OMPI_MCA_", "MALLOC_", "OMP_", "MKL_")


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A command that has ended."""

    code: int | None
    """Exit code; None when it was killed because its time was up."""
    stdout: str
    stderr: str
    seconds: float

    @property
    def problem(self) -> str | None:
        """What went wrong, in one line; None for exit code 0."""
        if self.code == 0:
            return None
        if self.code is None:
            return f"killed after {self.seconds:.0f} s"
        # Launchers add boxes and advice of their own below what the rank said.
        lines = [line for line in self.stderr.splitlines() if any(letter.isalnum() for letter in line)]
        ours = [line for line in lines if line.startswith("trainer: ")]
        return f"exit code {self.code}: {(ours or lines or ['no word on stderr'])[-1]}"

    @property
    def last_words(self) -> str:
        """The end of stderr, for who looks into a failure."""
        return self.stderr[-_LAST_WORDS:]


def run(command: Sequence[str], *, timeout_s: float, threads: int | None = None) -> Finished:
    """Runs `command` in the project's root.

    When its time is up, or this process is interrupted, it is ended with everything that it started.

    Args:
        threads: OMP_NUM_THREADS for every rank; None leaves the choice to the contestant.
    """
    started = time.monotonic()
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**_environment(threads), _MARK: mark},
        cwd=ROOT,
        start_new_session=True,
    )
    code: int | None = None
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        _end(mark)
        stdout, stderr = process.communicate()
    finally:
        _end(mark)
    seconds = time.monotonic() - started
    return Finished(code=code, stdout=_RANK_MARK.sub("", stdout), stderr=_RANK_MARK.sub("", stderr), seconds=seconds)


def launch(script: str, ranks: int, launcher: str = "horovodrun") -> list[str]:
    """The command that starts `script` on so many ranks of this host; one rank of Horovod needs no launcher."""
    if launcher == "torchrun":
        # Standalone takes a free port; the default one belongs to whatever else torchrun runs on this host.
        return ["torchrun", "--standalone", "--nproc-per-node", str(ranks), script]
    if ranks == 1:
        return [sys.executable, script]
    return ["horovodrun", "-np", str(ranks), "-H", f"localhost:{ranks}", sys.executable, script]


def on_one_core(command: Sequence[str]) -> list[str]:
    """`command`, bound to the first core that this process may use."""
    if shutil.which("taskset") is None:
        return list(command)
    return ["taskset", "-c", str(min(os.sched_getaffinity(0))), *command]


def end_on_sigterm() -> None:
    """Makes SIGTERM end this process like Ctrl-C, so that what it has started is ended, too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _environment(threads: int | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN_SETTINGS)}
    kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
    kept["CUDA_VISIBLE_DEVICES"] = ""
    if threads is not None:
        kept["OMP_NUM_THREADS"] = str(threads)
    return kept


def _end(mark: str) -> None:
    """Ends every process of a run, gently at first.

    Launchers put their ranks into process groups and sessions of their own, and a rank whose launcher has died
    has another parent. What all of them keep is the environment that the run was started with.
    """
    alive = _marked(mark)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    psutil.wait_procs(alive, timeout=_GRACE_S)
    for process in _marked(mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark:
                found.append(process)
    return found

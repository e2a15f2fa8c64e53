"""What measurements share: options, commands with all their ranks, the end of what they leave, the processor's name."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run; a closed terminal sends SIGHUP."""
_GRACE_S = 20.0
"""Time for a launcher to end its ranks, those on other hosts included."""
_POLL_S = 0.1
_REST_S = 1.0
"""Time to read what is left in the pipes of a command that has ended."""
_MARK = "TRAINER_RUN"
# horovodrun prefixes every piece of output with its rank.
_RANK_MARK = re.compile(r"\[(?:\d+,)?\d+\]<std(?:out|err)>:")


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with a script's docstring, as it is wrapped there."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=formatter, allow_abbrev=False)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A command that has ended."""

    code: int | None
    """Exit code; None when it was killed at its timeout."""
    stdout: str
    stderr: str
    seconds: float

    @property
    def problem(self) -> str | None:
        """Describe the failure in one line; None for exit code 0."""
        if self.code == 0:
            return None
        if self.code is None:
            return f"killed after {self.seconds:.0f} s"
        return f"exit code {self.code}: {self.last_line}"

    @property
    def last_line(self) -> str:
        """Return the last meaningful line of output: ours first, then stderr's, then stdout's."""
        # Launchers print frames and advice of their own below the rank's output.
        errors, printed = (
            [line for line in text.splitlines() if any(letter.isalnum() for letter in line)]
            for text in (self.stderr, self.stdout)
        )
        ours = [line for line in errors if line.startswith("trainer: ") and "rank 0 of " not in line]
        return (ours or errors or printed or ["no output"])[-1]


def run(command: Sequence[str], *, env: Mapping[str, str], timeout_s: float, cwd: Path | None = None) -> Finished:
    """Run `command`; at its timeout, or when this process is interrupted, end it with all processes that it started.

    Args:
        env: its whole environment. The folder of this Python's commands is put first on its PATH.
    """
    started = time.monotonic()
    mark = uuid.uuid4().hex
    path = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
    # In a session of its own, so that Ctrl-C reaches it only through this process, once.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**env, "PATH": path, _MARK: mark},
        cwd=cwd,
        start_new_session=True,
    )
    code: int | None = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=timeout_s)
        code = process.poll()  # it may have ended, while another process keeps its pipes open
    finally:
        _end(process, mark)
    stdout, stderr = _output(process)
    seconds = time.monotonic() - started
    return Finished(code=code, stdout=_RANK_MARK.sub("", stdout), stderr=_RANK_MARK.sub("", stderr), seconds=seconds)


def _output(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return all output of a process that has ended, without waiting for a survivor that keeps its pipes open."""
    try:
        return process.communicate(timeout=_REST_S)  # that of the earlier calls included
    except subprocess.TimeoutExpired as late:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        stdout, stderr = ((part or b"").decode(errors="replace") for part in (late.output, late.stderr))
        return stdout, stderr


def interrupt_on(*numbers: signal.Signals) -> None:
    """Make these signals raise KeyboardInterrupt, so that `run` ends what it has started."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in numbers:
        signal.signal(number, interrupt)


def _end(process: subprocess.Popen[str], mark: str) -> None:
    """End every process of a run: terminate the launcher, then kill what is left.

    Launchers put their ranks into process groups and sessions of their own, and a rank whose launcher has died
    has another parent. All of them keep the environment that the run was started with, and the mark in it.
    """
    with _signals_deferred():
        if process.poll() is None:
            process.terminate()
            deadline = time.monotonic() + _GRACE_S
            while process.poll() is None and time.monotonic() < deadline:
                # Reads as well, so that a full pipe cannot block it; in turns, because a child that outlives the
                # launcher keeps the pipe open.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=_POLL_S)
        left = processes_with(_MARK, mark)
        for survivor in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                survivor.kill()
        psutil.wait_procs(left, timeout=_GRACE_S)


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer interrupts to the end of a `with` block."""
    received: list[int] = []
    earlier = {number: signal.signal(number, lambda number, _: received.append(number)) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """Return the running processes with this value of an environment variable, which children inherit."""
    marked = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                marked.append(process)
    return marked


def cpu_model() -> str:
    """Return the processor's name, or the architecture's where the kernel does not tell."""
    try:
        name = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        name = None
    return name[1] if name else platform.machine()

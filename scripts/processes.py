"""Runs commands so that nothing of them outlives who started them, launchers with their ranks among them."""

from __future__ import annotations

import contextlib
import os
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
"""All of them end what is going on; a lost terminal is one of them."""
_GRACE_S = 20.0
"""For a launcher to end its ranks, those on other hosts too."""
_LAST_WORDS = 4000
_MARK = "TRAINER_RUN"
# horovodrun marks every piece of output with the rank that it came from.
_RANK_MARK = re.compile(r"\[\d+,\d+\]<std(?:out|err)>:")


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
        return f"exit code {self.code}: {self.last_line}"

    @property
    def last_line(self) -> str:
        """What it said last that means something: ours first, then stderr."""
        # Launchers add boxes and advice of their own below what the rank said.
        said, printed = (
            [line for line in text.splitlines() if any(letter.isalnum() for letter in line)]
            for text in (self.stderr, self.stdout)
        )
        ours = [line for line in said if line.startswith("trainer: ") and "tuned: " not in line]
        return (ours or said or printed or ["no word"])[-1]

    @property
    def last_words(self) -> str:
        """The end of stderr, for who looks into a failure."""
        return self.stderr[-_LAST_WORDS:]


def run(command: Sequence[str], *, env: Mapping[str, str], timeout_s: float, cwd: Path | None = None) -> Finished:
    """Runs `command`; when its time is up, or this process is interrupted, ends it with all that it started.

    Args:
        env: all of its environment. What this Python has installed comes first on its PATH.
    """
    started = time.monotonic()
    mark = uuid.uuid4().hex
    path = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
    # In a session of its own, so that Ctrl-C reaches it from here, once, and in order.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        errors="replace", env={**env, "PATH": path, _MARK: mark}, cwd=cwd, start_new_session=True,
    )  # fmt: skip
    code: int | None = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=timeout_s)
            code = process.returncode
    finally:
        _end(process, mark)
    stdout, stderr = process.communicate()  # all of what has been read so far, once more
    seconds = time.monotonic() - started
    return Finished(code=code, stdout=_RANK_MARK.sub("", stdout), stderr=_RANK_MARK.sub("", stderr), seconds=seconds)


def interrupt_on(*numbers: signal.Signals) -> None:
    """Makes these signals end this process like Ctrl-C, so that what it has started is ended, too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in numbers:
        signal.signal(number, interrupt)


def _end(process: subprocess.Popen[str], mark: str) -> None:
    """Ends every process of a run: the launcher is asked to do it, and what is left then is not asked.

    Launchers put their ranks into process groups and sessions of their own, and a rank whose launcher has died
    has another parent. What all of them keep is the environment that the run was started with.
    """
    with _undisturbed():
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_GRACE_S)  # and reads, lest it wait for room to write
        left = _marked(mark)
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, timeout=_GRACE_S)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Whoever interrupts must not keep us from it, and is heard afterwards."""
    came: list[int] = []
    earlier = {number: signal.signal(number, lambda number, _: came.append(number)) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark:
                found.append(process)
    return found

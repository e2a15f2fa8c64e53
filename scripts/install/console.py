"""Runs long commands for the set-up scripts: their output goes to a log, and a failure shows its end.

Only the standard library: the set-up runs this before anything is installed.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

_PLAIN_INTERVAL_S = 15.0
_TERMINAL_INTERVAL_S = 0.5
_PERCENT = re.compile(rb"^ *\[ *(\d+)%\]")  # what Ninja prints before each step, by the build's NINJA_STATUS


class SetupError(Exception):
    """A problem that the user can solve; its text is the whole message."""


def say(text: str) -> None:
    """Prints one line on stderr, so that stdout stays free for results."""
    print(f"trainer: {text}", file=sys.stderr, flush=True)


def run(title: str, command: list[str], log: Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
    """Runs `command` with its output in `log`, and prints every few seconds how long it has run.

    Raises:
        SetupError: the command failed; the text ends with the last lines of its output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("wb") as sink:
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, cwd=cwd)
        except OSError as error:
            raise SetupError(f"{title} failed: {command[0]}: {error.strerror}") from None
        tail: collections.deque[bytes] = collections.deque(maxlen=25)
        progress = _Progress(title, started)
        try:
            assert process.stdout is not None  # noqa: S101 (PIPE was asked for)
            for line in process.stdout:
                sink.write(line)
                tail.append(line)
                progress.saw(line)
            code = process.wait()
        finally:
            progress.stop()
            if process.poll() is None:
                process.kill()
    if code != 0:
        last = b"".join(tail).decode(errors="replace")
        raise SetupError(f"{title} failed (exit code {code}). The end of {log}:\n{last}")
    say(f"{title}: done in {time.monotonic() - started:.0f} s")


class _Progress:
    """The time that a command has run: one changing line on a terminal, a line every 15 s elsewhere."""

    def __init__(self, title: str, started: float) -> None:
        self._title = title
        self._started = started
        self._percent = ""
        self._done = threading.Event()
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        say(f"{title} ...")
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def saw(self, line: bytes) -> None:
        match = _PERCENT.match(line)
        if match:
            self._percent = f", {int(match[1])} %"

    def stop(self) -> None:
        self._done.set()
        self._thread.join()
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _beat(self) -> None:
        interval = _TERMINAL_INTERVAL_S if self._terminal else _PLAIN_INTERVAL_S
        while not self._done.wait(interval):
            elapsed = f"{self._title} ... {time.monotonic() - self._started:.0f} s{self._percent}"
            if self._terminal:
                print(f"\r\033[Ktrainer: {elapsed}", end="", file=sys.stderr, flush=True)
            else:
                say(elapsed)

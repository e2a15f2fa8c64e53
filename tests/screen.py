"""A terminal for tests: runs a command on one, and interprets what arrives there as a terminal does."""

from __future__ import annotations

import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

_TOKEN = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])|\x1b([78D])|([\r\n])|([^\x1b\r\n])")
# The terminal becomes that of a new session, with the command in its foreground, as a shell's command is.
_AS_FROM_SHELL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)


class Screen:
    """What is to be seen on a terminal; it knows the control sequences that the library uses, and no others."""

    def __init__(self, columns: int = 100, lines: int = 12) -> None:
        self.columns, self.lines = columns, lines
        self.rows = [[" "] * columns for _ in range(lines)]
        self.row = self.column = 0
        self.top, self.bottom = 0, lines - 1
        self.scrolled: list[str] = []
        """Lines that have left at the top."""
        self.bottom_lines: list[str] = []
        """What the last line showed, each time that a program went back to where it was."""
        self._saved = (0, 0)
        self._rest = ""

    def feed(self, text: str) -> None:
        """Take what a program has written; an unfinished sequence waits for its rest."""
        text, position = self._rest + text, 0
        while match := _TOKEN.match(text, position):
            position = match.end()
            arguments, command, single, end, character = match.groups()
            if command:
                self._control(command, [int(argument or 1) for argument in arguments.split(";")] if arguments else [])
            elif single:
                self._single(single)
            elif end:
                self._end(end)
            else:
                self._put(character)
        self._rest = text[position:]

    def text(self) -> list[str]:
        """Return all lines but the empty ones at the end, those that have scrolled away included."""
        rows = [*self.scrolled, *("".join(row).rstrip() for row in self.rows)]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def last_line(self) -> str:
        return "".join(self.rows[-1]).rstrip()

    def _control(self, command: str, numbers: list[int]) -> None:
        if command == "r":
            self.top, self.bottom = (numbers[0] - 1, numbers[1] - 1) if numbers else (0, self.lines - 1)
            self.row = self.column = 0
        elif command == "H":
            self.row, self.column = min(numbers[0], self.lines) - 1, numbers[1] - 1
        elif command == "A":
            self.row = max(self.row - 1, 0)
        elif (command, numbers) == ("K", [2]):
            self.rows[self.row] = [" "] * self.columns
        else:
            raise ValueError(f"unknown control sequence {command!r} {numbers}")

    def _single(self, command: str) -> None:
        if command == "7":
            self._saved = (self.row, self.column)
        elif command == "8":
            self.row, self.column = self._saved
            if [self.last_line()] != self.bottom_lines[-1:]:
                self.bottom_lines.append(self.last_line())
        else:
            self._down()

    def _end(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        else:
            self._down()

    def _down(self) -> None:
        if self.row == self.bottom:
            self.scrolled.append("".join(self.rows.pop(self.top)).rstrip())
            self.rows.insert(self.bottom, [" "] * self.columns)
        else:
            self.row = min(self.row + 1, self.lines - 1)

    def _put(self, character: str) -> None:
        if self.column == self.columns:
            self.column = 0
            self._down()
        self.rows[self.row][self.column] = character
        self.column += 1


@dataclass
class Session:
    """A command that has run on a terminal."""

    screen: Screen
    code: int = -1


def run_on_terminal(
    command: Sequence[str],
    *,
    screen: Screen | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 60.0,
    on_change: Callable[[Session, int], object] = lambda session, terminal: None,
) -> Session:
    """Run a command in the foreground of a new terminal, until it ends and nothing holds the terminal any more.

    Args:
        on_change: called with the session and the terminal's descriptor after each change.
    """
    session = Session(screen or Screen())
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", session.screen.lines, session.screen.columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    process = subprocess.Popen(
        [sys.executable, "-c", _AS_FROM_SHELL, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        cwd=cwd,
        env=environment | {"TERM": "xterm"} | dict(env or {}),
    )
    os.close(theirs)
    try:
        _read_all(ours, session, timeout_s, on_change)
        session.code = process.wait(timeout=timeout_s)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return session


def _read_all(terminal: int, session: Session, timeout_s: float, on_change: Callable[[Session, int], object]) -> None:
    deadline, held = time.monotonic() + timeout_s, b""
    while select.select([terminal], [], [], max(deadline - time.monotonic(), 0))[0]:
        try:
            held += os.read(terminal, 2**16)
        except OSError:  # the last one has closed it
            return
        text = held.decode(errors="ignore")  # up to an unfinished character
        held = held[len(text.encode()) :]
        session.screen.feed(text)
        on_change(session, terminal)
    raise TimeoutError(f"after {timeout_s} s, this is on the screen:\n" + "\n".join(session.screen.text()))

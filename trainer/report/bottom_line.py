"""The bottom line of a terminal, below everything that is printed there."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable

from trainer.report.terminal import Terminal

_MIN_COLUMNS, _MIN_LINES = 20, 4

# Control sequences of every terminal since the VT100: save and restore the cursor, the region that scrolls.
_SAVE, _RESTORE, _WHOLE_SCREEN, _ERASE = "\x1b7", "\x1b8", "\x1b[r", "\x1b[2K"
_LINE_DOWN, _LINE_UP = "\x1bD", "\x1b[A"
_GIVE_BACK = f"{_SAVE}{_WHOLE_SCREEN}\x1b[999;1H{_ERASE}{_RESTORE}"

# Gives the line back when this process has ended without doing so, also by SIGKILL: its end closes the pipe.
# Through a link to its own output, which then blocks where ours does not.
_WATCH = f"trap '' HUP INT QUIT TERM; read done || printf '{_GIVE_BACK}' > /proc/self/fd/1".replace("\x1b", "\\033")


class BottomLine:
    """One line of text at the bottom of a terminal, while other output scrolls above it.

    The launcher writes to the same terminal when it likes, with lines of all ranks. A bar on the line of the cursor
    would be torn apart by them, and they by it.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._size = (0, 0)
        self._watcher: subprocess.Popen[bytes] | None = None

    def draw(self, text: Callable[[int], str]) -> bool:
        """Draw a line; return whether there was a place for it.

        Args:
            text: makes it for a number of columns, which it may fill.
        """
        size = columns, lines = self._terminal.size()
        if columns < _MIN_COLUMNS or lines < _MIN_LINES or not self._terminal.in_foreground():
            self.clear()
            return False
        if self._watcher is None:
            try:
                self._watcher = self._start_watcher()
            except OSError:  # no shell here, or no process more
                return False
        head = self._take(lines) if size != self._size else ""
        if self._write(f"{head}{_SAVE}\x1b[{lines};1H{_ERASE}{text(columns - 1)}{_RESTORE}"):
            self._size = size
        return True

    def clear(self) -> None:
        """Give the line back to the terminal."""
        watcher, self._watcher, self._size = self._watcher, None, (0, 0)
        if watcher is None:
            return
        if self._write(_GIVE_BACK):
            watcher.communicate(b"done\n")
        elif watcher.stdin is not None:  # the watcher does it when the terminal goes on
            watcher.stdin.close()

    def _take(self, lines: int) -> str:
        """Return the sequence that leaves the bottom line out of what scrolls, and a free line to print on above."""
        free = f"{_SAVE}{_WHOLE_SCREEN}{_RESTORE}{_LINE_DOWN}{_LINE_UP}"
        return f"{free}{_SAVE}\x1b[1;{lines - 1}r{_RESTORE}"

    def _start_watcher(self) -> subprocess.Popen[bytes]:
        # In a session of its own, so that what ends this process's group leaves it.
        return subprocess.Popen(
            ["sh", "-c", _WATCH],
            stdin=subprocess.PIPE,
            stdout=self._terminal.descriptor,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _write(self, text: str) -> bool:
        """Write all of a text, or nothing where the terminal takes nothing now."""
        # mpirun's ranks are in the background of its terminal. After `stty tostop` a write would stop this one.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            poll = select.poll()
            poll.register(self._terminal.descriptor, select.POLLOUT)
            if (self._terminal.descriptor, select.POLLOUT) in poll.poll(0):
                os.write(self._terminal.descriptor, text.encode(errors="replace"))
                return True
        except OSError:  # the terminal has gone
            pass
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return False

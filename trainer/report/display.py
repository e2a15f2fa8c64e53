"""The progress of an epoch: a bar at the bottom of the job's terminal, or a line now and then without a terminal."""

from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
from tqdm import tqdm

from trainer.cluster.output import print_line
from trainer.cluster.processes import read_process

_MIN_COLUMNS, _MIN_LINES = 20, 4
# These pass their ranks' standard error on to their own. Any other reader of it, a script that collects output say,
# keeps it from the terminal.
_FORWARDING = frozenset({"horovodrun", "mpirun", "mpiexec", "orterun", "prterun"})

# Control sequences of every terminal since the VT100: save and restore the cursor, the region that scrolls.
_SAVE, _RESTORE, _WHOLE_SCREEN, _ERASE = "\x1b7", "\x1b8", "\x1b[r", "\x1b[2K"
_LINE_DOWN, _LINE_UP = "\x1bD", "\x1b[A"
_GIVE_BACK = f"{_SAVE}{_WHOLE_SCREEN}\x1b[999;1H{_ERASE}{_RESTORE}"

# Gives the line back when this process has ended without doing so, also by SIGKILL: its end closes the pipe.
# Through a link to its own output, which then blocks where ours does not.
_WATCH = f"trap '' HUP INT QUIT TERM; read done || printf '{_GIVE_BACK}' > /proc/self/fd/1".replace("\x1b", "\\033")


class Display:
    """Rank 0's view of a loop.

    Args:
        every_s: seconds between two lines where there is no terminal.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next_line = time.monotonic() + every_s
        disabled = os.environ.get("TQDM_DISABLE", "0") not in ("", "0")
        self._bar = None if disabled else find_bottom_line()

    def show(self, head: str, done: int, samples: int | None, details: Sequence[str]) -> None:
        """Show that `done` of `samples` are trained on; of a stream nobody may know how many there are."""
        if self._bar is not None and self._bar.draw(partial(_bar, head, done, samples, details)):
            return
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + self._every_s
            print_line("  ".join([head, f"{done}" if samples is None else f"{done}/{samples}", *details]))

    def clear(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.clear()


def _bar(head: str, done: int, samples: int | None, details: Sequence[str], columns: int) -> str:
    if samples is None:
        return ", ".join([f"{head}  {done:,}", *details])[:columns]
    return tqdm.format_meter(  # type: ignore[call-arg]  # further arguments are for the format
        done,
        samples,
        0,
        ncols=columns,
        prefix=head,
        ascii="utf" not in str(getattr(sys.stderr, "encoding", "")).lower(),
        bar_format="{desc} {percentage:3.0f}%|{bar}| {details}",
        details=", ".join(details),
    )


def clock(seconds: float) -> str:
    """Format a duration, as in 3:10 or 1:02:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class BottomLine:
    """One line of text at the bottom of a terminal, while other output scrolls above it.

    The launcher writes to the same terminal when it likes, with lines of all ranks. A bar on the line of the cursor
    would be torn apart by them, and they by it.

    Args:
        descriptor: of the terminal, which is closed with this object. It must not block, so that a terminal which was
            halted with Ctrl-S halts no training.
        process: through which the shell sees this job: the launcher, or this one.
    """

    def __init__(self, descriptor: int, process: int) -> None:
        self._descriptor, self._process = descriptor, process
        self._size = (0, 0)
        self._watcher: subprocess.Popen[bytes] | None = None

    def __del__(self) -> None:
        os.close(self._descriptor)

    def draw(self, text: Callable[[int], str]) -> bool:
        """Draw a line; return whether there was a place for it.

        Args:
            text: makes it for a number of columns, which it may fill.
        """
        size = columns, lines = self._terminal_size()
        if columns < _MIN_COLUMNS or lines < _MIN_LINES or not self.in_foreground():
            self.clear()
            return False
        if self._watcher is None:
            try:
                self._watcher = self._start_watcher()
            except OSError:  # no shell here, or no process more
                return False
        head = ""
        if size != self._size:  # leave the bottom line out of what scrolls, and a free line to print on above it
            head = f"{_SAVE}{_WHOLE_SCREEN}{_RESTORE}{_LINE_DOWN}{_LINE_UP}{_SAVE}\x1b[1;{lines - 1}r{_RESTORE}"
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

    def in_foreground(self) -> bool:
        """Return whether the job is what the terminal shows now; one in the background leaves it to the shell."""
        with suppress(OSError):
            process = read_process(self._process)
            return process.group == process.foreground
        return False

    def _terminal_size(self) -> tuple[int, int]:
        """Return the columns and the lines; 0 of both where the terminal has none, or has gone."""
        with suppress(OSError):
            return os.get_terminal_size(self._descriptor)
        return 0, 0

    def _start_watcher(self) -> subprocess.Popen[bytes]:
        # In a session of its own, so that what ends this process's group leaves it.
        return subprocess.Popen(
            ["sh", "-c", _WATCH],
            stdin=subprocess.PIPE,
            stdout=self._descriptor,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _write(self, text: str) -> bool:
        """Write all of a text, or nothing where the terminal takes nothing now."""
        # mpirun's ranks are in the background of its terminal. After `stty tostop` a write would stop this one.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLOUT)
            if (self._descriptor, select.POLLOUT) in poll.poll(0):
                os.write(self._descriptor, text.encode(errors="replace"))
                return True
        except OSError:  # the terminal has gone
            pass
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return False


def find_bottom_line() -> BottomLine | None:
    """Open the terminal at the end of this process's standard error, or return None where it ends elsewhere.

    mpirun and horovodrun give their ranks pipes, and pass on what they read. So a pipe is followed to the launcher
    that reads it, and from there to that one's standard error, as long as these are this process's ancestors: on
    another host, or behind `2> log` and `2>&1 | tee log`, there is no terminal.
    """
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    # No /proc, a process of another user's, or none that it was looked for.
    with suppress(OSError, psutil.Error, StopIteration):
        holder = psutil.Process()
        while stat.S_ISFIFO((pipe := Path(f"/proc/{holder.pid}/fd/2").stat()).st_mode):
            holder = next(process for process in holder.parents() if _passes_on(process, pipe))
        if stat.S_ISCHR(pipe.st_mode):
            # torchrun gives its ranks its own terminal, but sessions of their own, which the shell does not know.
            ancestors = (process.pid for process in (holder, *holder.parents()))
            seen_by_shell = next(process for process in ancestors if read_process(process).terminal == pipe.st_rdev)
            # Through the link, as the path may name another device where the process is in a container.
            flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
            return BottomLine(os.open(f"/proc/{holder.pid}/fd/2", flags), seen_by_shell)
    return None


def _passes_on(process: psutil.Process, pipe: os.stat_result) -> bool:
    """Return whether a process is a launcher which has the other end of this pipe."""
    program = process.cmdline()[:2]  # or the script that Python runs
    if not any(Path(part).name in _FORWARDING for part in program):
        return False
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(OSError):  # closed in the meantime
            if os.path.samestat(entry.stat(), pipe):
                return True
    return False

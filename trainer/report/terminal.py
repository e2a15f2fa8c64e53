"""The terminal that a job was started on, which its rank 0 finds behind the launcher."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.cluster.processes import read_process

# These pass their ranks' standard error on to their own. Any other reader of it, a script that collects output say,
# keeps it from the terminal.
_FORWARDING = frozenset({"horovodrun", "mpirun", "mpiexec", "orterun", "prterun"})


@dataclass(frozen=True)
class Terminal:
    """A terminal, opened for writing."""

    descriptor: int
    """Does not block, so that a terminal which was halted with Ctrl-S halts no training."""
    process: int
    """The process through which the shell sees this job: the launcher, or this one."""

    def in_foreground(self) -> bool:
        """Return whether the job is what the terminal shows now; one in the background leaves it to the shell."""
        with suppress(OSError):
            process = read_process(self.process)
            return process.group == process.foreground
        return False

    def size(self) -> tuple[int, int]:
        """Return the columns and the lines; 0 of both where the terminal has none, or has gone."""
        with suppress(OSError):
            return os.get_terminal_size(self.descriptor)
        return 0, 0

    def __del__(self) -> None:
        os.close(self.descriptor)


def open_terminal() -> Terminal | None:
    """Open the terminal at the end of this process's standard error, or return None where it ends elsewhere.

    mpirun and horovodrun give their ranks pipes, and pass on what they read. So a pipe is followed to the launcher
    that reads it, and from there to that one's standard error, as long as these are this process's ancestors: on
    another host, or behind `2> log` and `2>&1 | tee log`, there is no terminal.
    """
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    with suppress(OSError, ValueError):  # no /proc, or a process of another user's
        holder = os.getpid()
        while stat.S_ISFIFO((pipe := Path(f"/proc/{holder}/fd/2").stat()).st_mode):
            holder = next(
                one for one in _upward(read_process(holder).parent) if _forwards(one) and _has_open(one, pipe)
            )
        if stat.S_ISCHR(pipe.st_mode):
            return _open(holder, pipe.st_rdev)
    return None


def _open(holder: int, device: int) -> Terminal | None:
    # torchrun gives its ranks its own terminal, but sessions of their own, which the shell does not know.
    seen_by_shell = next(one for one in _upward(holder) if read_process(one).terminal == device)
    # Through the link, as the path may name another device where the process is in a container.
    descriptor = os.open(f"/proc/{holder}/fd/2", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    return Terminal(descriptor, seen_by_shell)


def _upward(process: int) -> Iterator[int]:
    """Yield a process, its parent and so on.

    Raises:
        ValueError: at the end, instead of ending, so that a search which finds nothing is one.
    """
    while process > 0:
        yield process
        process = read_process(process).parent
    raise ValueError("no such process")


def _forwards(process: int) -> bool:
    # The program, or the script that Python runs.
    command = Path(f"/proc/{process}/cmdline").read_text(errors="replace").split("\0")[:2]
    return any(Path(part).name in _FORWARDING for part in command)


def _has_open(process: int, file: os.stat_result) -> bool:
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):  # closed in the meantime
            if os.path.samestat(entry.stat(), file):
                return True
    return False

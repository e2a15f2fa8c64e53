"""What /proc says of a process, see proc_pid_stat(5), and what ends one."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GONE = "X"
"""State of a process that is gone, or that is only an entry which its parent has not read yet."""
_PR_SET_PDEATHSIG = 1
_TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """A process or a thread."""

    state: str
    """The kernel's letter."""
    cpu_s: float
    """Processor time that it has taken."""


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when the process that has started it ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def read_process(pid: int | str, thread: int | str = "") -> Process:
    """Return what /proc says of a process, or of one of its threads.

    Raises:
        OSError: it is gone.
        ValueError, IndexError: it is no process.
    """
    path = f"/proc/{pid}/task/{thread}/stat" if thread else f"/proc/{pid}/stat"
    # The state follows the name, which is in parentheses and may hold some itself: "12 (python) S 1 …".
    fields = Path(path).read_text(errors="replace").rpartition(") ")[2].split()
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_S
    return Process(fields[0], cpu_s)


def is_running(pid: int) -> bool:
    """Return whether a process runs."""
    return look(pid).state != GONE


def look(pid: int, thread: int = 0) -> Process:
    """Look at a process, which may be gone.

    Args:
        thread: whose state and processor time are meant; 0 is the main thread.
    """
    with suppress(OSError, ValueError, IndexError):
        process = read_process(pid)
        if process.state not in "ZX":
            with suppress(OSError, ValueError, IndexError):
                return read_process(pid, thread or pid)
            return process
    return Process(GONE, 0.0)

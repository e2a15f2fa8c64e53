"""A terminal for tests: runs a command in its foreground, and keeps what arrives there."""

from __future__ import annotations

import os
import pty
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

# The terminal becomes that of a new session, with the command in its foreground, as a shell's command is.
_AS_FROM_SHELL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)


@dataclass
class Session:
    """A command that runs on a terminal, or has run."""

    text: str = ""
    """What has arrived, the control characters included."""
    code: int = -1


def run_on_terminal(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 60.0,
    on_change: Callable[[Session, int], object] = lambda session, terminal: None,
) -> Session:
    """Run a command in the foreground of a new terminal, until it ends and nothing holds the terminal any more.

    Args:
        on_change: called with the session and the terminal's descriptor after each change.
    """
    session = Session()
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
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
    deadline, arrived = time.monotonic() + timeout_s, b""
    while select.select([terminal], [], [], max(deadline - time.monotonic(), 0))[0]:
        try:
            arrived += os.read(terminal, 2**16)
        except OSError:  # the last process has closed it
            return
        session.text = arrived.decode(errors="ignore")
        on_change(session, terminal)
    raise TimeoutError(f"after {timeout_s} s, this has arrived:\n{session.text}")

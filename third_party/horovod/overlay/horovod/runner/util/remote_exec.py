"""Runs one rank, behind ssh or not, with an environment that no command line shows.

`python -m horovod.runner.util.remote_exec FOLDER` reads the command and the environment from stdin, and goes on
reading: when stdin ends, the launcher or its ssh has gone, and the command and its children end as well.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

GRACEFUL_TERMINATION_TIME_S = 5

# Ends a message of the command and NAME=VALUE, each NUL-terminated: none of those is empty.
_END = b"\0\0"


def encode(command: str, env: Mapping[str, str]) -> bytes:
    """Return what goes to stdin: a command as a shell reads it (as one argument, Linux would take 128 KiB of it)."""
    return b"\0".join(os.fsencode(entry) for entry in [command, *(f"{name}={env[name]}" for name in env)]) + _END


def _read() -> tuple[list[str], dict[str, str]]:
    message = b""
    while not message.endswith(_END):
        chunk = os.read(0, 65536)
        if not chunk:
            sys.exit("horovodrun: the connection ended before the environment had arrived")
        message += chunk
    command, *entries = (os.fsdecode(entry) for entry in message[: -len(_END)].split(b"\0"))
    return shlex.split(command), {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def _signal_group(group: int, signum: int) -> bool:
    """Return whether there still is a process in the group."""
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return False
    return True


def _end_group(group: int) -> None:
    deadline = time.monotonic() + GRACEFUL_TERMINATION_TIME_S
    alive = _signal_group(group, signal.SIGTERM)
    while alive and time.monotonic() < deadline:
        time.sleep(0.05)
        alive = _signal_group(group, 0)
    _signal_group(group, signal.SIGKILL)


class _Ender:
    """Ends the command's group at the end of stdin or at a signal, which may come before the command has started."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._group = 0
        self._threads: list[threading.Thread] = []
        for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *_: self._end())

    def started(self, group: int) -> None:
        self._group = group
        self._started.set()
        threading.Thread(target=self._end_with_stdin, daemon=True).start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _end(self) -> None:
        self._threads.append(threading.Thread(target=self._end_when_started, daemon=True))
        self._threads[-1].start()

    def _end_when_started(self) -> None:
        self._started.wait()
        _end_group(self._group)

    def _end_with_stdin(self) -> None:
        while os.read(0, 65536):
            pass
        self._end()


def run(folder: str) -> int:
    """Run the command that stdin brings; return its exit code, 128 + N if signal N ended it."""
    command, env = _read()
    try:
        os.chdir(folder)
    except OSError as error:
        print(f"horovodrun: cannot change to {folder}: {error.strerror}; staying in {Path.cwd()}", file=sys.stderr)
    ender = _Ender()
    try:
        # What stdin brings wins over what this host has, PATH above all.
        process = subprocess.Popen(command, env=os.environ | env, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        what = f"{command[0]} with {sum(map(len, command))} bytes of arguments"
        print(f"horovodrun: cannot start {what}: {error.strerror}", file=sys.stderr)
        return 127
    ender.started(process.pid)
    exit_code = process.wait()
    ender.join()
    return 128 - exit_code if exit_code < 0 else exit_code


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))

"""Run a command on a host of a job: through ssh, as a job is started, or directly where the host is this one."""

from __future__ import annotations

import os
import select
import shlex
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, cast

from trainer.ops.supervise.hosts import Host

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
NO_ANSWER = "no answer in time"
_MOST_BYTES = 1 << 20
"""Of a line: what a host prints without an end takes no more memory than that."""
_ERROR_BYTES = 20_000
DEBUG = ("-o", "LogLevel=DEBUG")
"""Options for ssh to say how far it has come."""
_KEY_EXCHANGE_BEGINS, _KEY_EXCHANGE_ENDS = "SSH2_MSG_KEXINIT sent", "SSH2_MSG_NEWKEYS received"
_DEBUG_LINES = ("debug1: ", "OpenSSH_", "Authenticated to ", "Transferred: ", "Bytes per second: ")


class Call:
    """A command that runs on a host, is given lines, and prints lines. It is ended at the end of the `with` block.

    Args:
        host: where it runs.
        command: the program and its arguments.
        options: of ssh.
    """

    def __init__(self, host: Host, command: Sequence[str], options: Sequence[str] = ()) -> None:
        self.host = host
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            command if host.is_here else [*SSH, *options, host.name, shlex.join(command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._input, self._output = cast("IO[bytes]", self._process.stdin), cast("IO[bytes]", self._process.stdout)
        self._buffer = b""
        self._has_ended = False

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, line: bytes) -> None:
        """Give the command a line; one that has ended is told by the lines that it does not print."""
        with suppress(OSError, ValueError):
            self._input.write(line + b"\n")
            self._input.flush()

    def line(self, timeout_s: float) -> bytes | None:
        """Return the next line that it prints, without the line break; None where none comes in time, or any more."""
        until = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        while b"\n" not in self._buffer:
            if len(self._buffer) >= _MOST_BYTES or not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                return None
            part = os.read(self._output.fileno(), 65536)
            if not part:
                self._has_ended = True
                return None
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def errors(self) -> str:
        """Return what the command, and ssh, have said last on standard error; without what `DEBUG` adds."""
        lines = [line.rstrip() for line in self._tail().splitlines() if not line.startswith(_DEBUG_LINES)]
        return "\n".join(lines).strip()

    @property
    def is_in_key_exchange(self) -> bool:
        """Whether ssh has sent its first large message, and waits for the answer. It says so with `DEBUG` only."""
        said = self._tail()
        return not self._has_ended and _KEY_EXCHANGE_BEGINS in said and _KEY_EXCHANGE_ENDS not in said

    def _tail(self) -> str:
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _ERROR_BYTES))
        return self._errors.read(_ERROR_BYTES).decode(errors="replace")

    def why(self) -> str:
        """Return why no line has come: how it has ended, or `NO_ANSWER`."""
        if not self._has_ended:
            return NO_ANSWER
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        end = f"{'it' if self.host.is_here else 'ssh'} has ended with code {self._process.returncode}"
        return self.errors().rpartition("\n")[2] or end

    def kill(self) -> None:
        """End it at once; who waits for a line gets none."""
        self._process.kill()

    def close(self) -> None:
        """End it: close its input, and kill it where it does not end by itself."""
        with suppress(OSError):
            self._input.close()
        try:
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
        self._errors.close()


def ssh_settings(name: str) -> dict[str, str]:
    """Return what `ssh -G` prints for a host, the first value of each setting; empty where it does not say."""
    try:
        done = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    return {name: value for name, _, value in reversed(lines)}

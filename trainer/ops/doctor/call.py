"""A call to a host: a program of `remote/` goes there through ssh, and its answers come back."""

from __future__ import annotations

import json
import os
import select
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from trainer.errors import TrainerError
from trainer.ops.supervise.hosts import Host
from trainer.untrusted import parse_json

MARK = "trainer-doctor-call"
NO_ANSWER, HANGS = "no answer in time", "no answer in ssh's key exchange"
"""The second is where ssh has sent its first large message, and waits for the answer."""
_MOST_BYTES = 1 << 20
"""Of a line: what a host prints without an end takes no more memory than that."""
# As the launchers call it, and it says how far it has come.
_OPTIONS = ("-o", "LogLevel=DEBUG")
_DEBUG_LINES = ("debug1: ", "OpenSSH_", "Authenticated to ", "Transferred: ", "Bytes per second: ")
# The current folder may hold a file that Python would import in place of one of its own modules.
_BOOT = (
    "import sys; sys.path[:1] = []; sys.version_info < (3, 8) and sys.exit('Python 3.8 or later is needed; ' + "
    "sys.executable + ' is ' + sys.version.split()[0]); import json; exec(json.loads(sys.stdin.buffer.readline()))"
)
# `command -v` finds the job's own Python by its path. A host without it is looked at with another one.
# In one line, as the login shell may be a csh, whose quotes end with the line.
_START = (
    "echo {mark}; for python in {pythons}; do "
    'command -v "$python" > /dev/null && exec "$python" -c {boot}; '
    'done; echo "no python3 on the PATH" >&2; exit 127'
)


class CallError(TrainerError):
    """A program did not answer, or could not do what it was asked for."""


class Call:
    """A program of `remote/` on a host, reached as a job is started. It is ended at the end of the `with` block."""

    def __init__(self, host: Host, program: str, arguments: Any) -> None:
        self.host = host
        self.printed = ""
        """What the login shell printed before the program ran."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            host.command(command(), _OPTIONS),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._input, self._output = cast("IO[bytes]", self._process.stdin), cast("IO[bytes]", self._process.stdout)
        self._buffer = b""
        self._has_ended = False
        self.tell(source_of(program))
        self.tell(arguments)

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tell(self, value: Any) -> None:
        """Give the program a value as a line of JSON; if it has ended, the answers that do not come say so."""
        with suppress(OSError, ValueError):
            self._input.write(json.dumps(value).encode() + b"\n")
            self._input.flush()

    def has_started(self, timeout_s: float) -> bool:
        """Wait until the login shell runs the command; return whether it does in time."""
        until = time.monotonic() + timeout_s
        while (line := self.line(until - time.monotonic())) is not None:
            text = line.decode(errors="replace")
            self.printed = self.printed or text.removesuffix(MARK).strip()
            if text.endswith(MARK):  # what is printed without an end of line stands before it
                return True
        return False

    def answer(self, timeout_s: float) -> Any:
        """Return the program's next answer. What the host prints beside its answers is not heard.

        Raises:
            CallError: none came in time, or the program has failed.
        """
        until = time.monotonic() + timeout_s
        while (line := self.line(until - time.monotonic())) is not None:
            if line.startswith(b'{"answer": '):
                try:
                    return parse_json(line)["answer"]
                except (ValueError, LookupError, TypeError):
                    break
        raise CallError(f"host {self.host.name}: {self.why()}")

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

    def why(self) -> str:
        """Return why no line has come: how the call has ended, `NO_ANSWER`, or `HANGS`."""
        if not self._has_ended:
            said = self._tail()
            return HANGS if "KEXINIT sent" in said and "NEWKEYS received" not in said else NO_ANSWER
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        return self.errors().rpartition("\n")[2] or f"the call has ended with code {self._process.returncode}"

    def errors(self) -> str:
        """Return what the program, and ssh, have said last on standard error; without the lines of LogLevel=DEBUG."""
        lines = [line.rstrip() for line in self._tail().splitlines() if not line.startswith(_DEBUG_LINES)]
        return "\n".join(lines).strip()

    def _tail(self) -> str:
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 20_000))
        return self._errors.read(20_000).decode(errors="replace")

    def kill(self) -> None:
        """End it at once; who waits for a line gets none."""
        self._process.kill()

    def close(self) -> None:
        """Close its input, and kill it where it does not end by itself."""
        with suppress(OSError):
            self._input.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        self.kill()
        self._process.wait()
        self._output.close()
        self._errors.close()


def source_of(name: str) -> str:
    """Return the text of a program of `remote/`."""
    return Path(__file__).with_name("remote").joinpath(f"{name}.py").read_text()


def command() -> list[str]:
    """Return the command that runs a program on any host."""
    pythons = dict.fromkeys((sys.executable, "python3", "python"))
    return ["sh", "-c", _START.format(mark=MARK, pythons=shlex.join(pythons), boot=shlex.quote(_BOOT))]

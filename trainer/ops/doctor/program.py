"""A program of `agent/` that runs on a host: its source goes there through ssh, and its answers come back."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.errors import TrainerError
from trainer.ops.ssh import Call
from trainer.ops.supervise.hosts import Host
from trainer.untrusted import parse_json

MARK = "trainer-doctor-agent"
_SOURCES = Path(__file__).with_name("agent")
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
_ANSWER = b'{"answer": '


class ProgramError(TrainerError):
    """A program did not answer, or could not do what it was asked for."""


class Program(Call):
    """A program on a host.

    Args:
        source: its text.
        arguments: what it reads as its first line, as JSON.
    """

    def __init__(self, host: Host, source: str, arguments: Any, options: Sequence[str] = ()) -> None:
        super().__init__(host, command(), options)
        self.printed = ""
        """What the login shell printed before the program ran."""
        self.tell(source)
        self.tell(arguments)

    def __enter__(self) -> Program:
        return self

    def tell(self, value: Any) -> None:
        """Give the program a value as a line of JSON."""
        self.send(json.dumps(value).encode())

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
            ProgramError: none came in time, or the program has failed.
        """
        until = time.monotonic() + timeout_s
        while (line := self.line(until - time.monotonic())) is not None:
            if line.startswith(_ANSWER):
                try:
                    return parse_json(line)["answer"]
                except (ValueError, LookupError, TypeError):
                    break
        raise ProgramError(f"host {self.host.name}: {self.why()}")


def source_of(name: str) -> str:
    """Return the text of a file of `agent/`."""
    return _SOURCES.joinpath(f"{name}.py").read_text()


def command() -> list[str]:
    """Return the command that runs a program on any host."""
    pythons = dict.fromkeys((sys.executable, "python3", "python"))
    return ["sh", "-c", _START.format(mark=MARK, pythons=shlex.join(pythons), boot=shlex.quote(_BOOT))]

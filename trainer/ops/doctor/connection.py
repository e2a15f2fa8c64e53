"""A connection to the agent on a host, which is started through ssh as a job is, and answers requests."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from trainer.errors import TrainerError
from trainer.ops.doctor.facts import Login
from trainer.ops.supervise.hosts import Host
from trainer.ops.supervise.remote import SSH
from trainer.untrusted import parse_json

MARK = "trainer-doctor-agent"
NO_ANSWER = "no answer in time"
_SOURCES = Path(__file__).with_name("agent")
_FILES = ("host", "network", "gpus")
_RELAY = Path(__file__).with_name("relay.py")
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
_ERROR_CHARACTERS = 2000
_MOST_BYTES = 1 << 20
"""Of a line. The longest answers have a text for each of many hosts or devices, or 40,000 characters of two ranks."""


class AgentError(TrainerError):
    """An agent did not answer, or could not do what it was asked for."""


class Connection:
    """An agent on a host; ends with `close`.

    Args:
        start_s: seconds for the start.
        all_s: seconds after which no answer is waited for any more.
        in_small_segments: whether ssh is to send and get small packets only.
    """

    def __init__(self, host: Host, start_s: float, all_s: float, *, in_small_segments: bool = False) -> None:
        self.host = host
        self._began = time.monotonic()
        self._start_s, self._until = start_s, self._began + all_s
        self._in_small_segments = in_small_segments
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            _command(host, in_small_segments=in_small_segments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._input, self._output = cast("IO[bytes]", self._process.stdin), cast("IO[bytes]", self._process.stdout)
        self._printed = ""
        self._waiting: dict[int, Future[Any]] = {}
        self._has_ended = False
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._send(_source("serve"), {name: _source(name) for name in _FILES})

    def login(self) -> Login:
        """Wait until the agent runs; return how that went."""
        error = ""
        try:
            self.call("clock", max(0.05, self._began + self._start_s - time.monotonic()))
        except AgentError:
            error = f"ssh has ended with code {self._process.wait()}" if self._has_ended else NO_ANSWER
            size = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, size - 4 * _ERROR_CHARACTERS))  # what ssh itself says tells more
            said = self._errors.read(4 * _ERROR_CHARACTERS).decode(errors="replace")
            error = said[-_ERROR_CHARACTERS:].strip() or error
        seconds = time.monotonic() - self._began
        return Login(seconds, error, in_small_segments=self._in_small_segments, printed=self._printed)

    def call(self, operation: str, timeout_s: float, **arguments: Any) -> Any:
        """Return the agent's answer.

        Raises:
            AgentError: it did not answer in time, or has failed.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._has_ended:
                raise AgentError(f"the agent on host {self.host.name} has ended")
            number = len(self._waiting)
            self._waiting[number] = future
        self._send({"id": number, "operation": operation, "arguments": arguments})
        timeout_s = max(0.0, min(timeout_s, self._until - time.monotonic()))
        try:
            return future.result(timeout=timeout_s)
        except TimeoutError:
            raise AgentError(f"host {self.host.name} did not answer to {operation!r} in {timeout_s:.0f} s") from None

    def close(self) -> None:
        """End the agent, and wait until its ssh has ended."""
        with suppress(OSError):
            self._input.close()
        try:
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=2.0)
        self._output.close()
        self._errors.close()

    def _send(self, *values: Any) -> None:
        with suppress(OSError, ValueError), self._lock:  # an agent that has ended is told by its answers
            self._input.write(b"".join(json.dumps(value).encode() + b"\n" for value in values))
            self._input.flush()

    def _read(self) -> None:
        has_started = False
        while line := self._output.readline(_MOST_BYTES):
            if not has_started:
                text = line.decode(errors="replace").rstrip("\n")
                has_started = text.endswith(MARK)  # what is printed without an end of line stands before it
                self._printed = self._printed or text.removesuffix(MARK).strip()
            elif line.startswith(b'{"id": ') and line.endswith(b"\n"):
                self._take(line)
        with self._lock:
            self._has_ended = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(AgentError(f"the agent on host {self.host.name} has ended"))

    def _take(self, line: bytes) -> None:
        """Give an answer to who waits for it. What the host prints beside the agent's answers is not heard."""
        with suppress(ValueError, LookupError, TypeError, InvalidStateError):
            reply = parse_json(line)
            with self._lock:
                future = self._waiting[reply["id"]]
            if "error" in reply:
                future.set_exception(AgentError(f"host {self.host.name}: {reply['error']}"))
            else:
                future.set_result(reply["value"])


def _command(host: Host, *, in_small_segments: bool) -> list[str]:
    pythons = dict.fromkeys((sys.executable, "python3", "python"))
    start = ["sh", "-c", _START.format(mark=MARK, pythons=shlex.join(pythons), boot=shlex.quote(_BOOT))]
    if host.is_here:
        return start
    relay = ["-o", f"ProxyCommand={shlex.quote(sys.executable)} {shlex.quote(str(_RELAY))} %h %p"]
    return [*SSH, *(relay if in_small_segments else []), host.name, shlex.join(start)]


def _source(name: str) -> str:
    return _SOURCES.joinpath(f"{name}.py").read_text()


def ssh_settings(host: Host) -> dict[str, str]:
    """Return what `ssh -G` prints for a host, the first value of each setting; empty where it does not say."""
    command = ["ssh", "-G", host.name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    return {name: value for name, _, value in reversed(lines)}

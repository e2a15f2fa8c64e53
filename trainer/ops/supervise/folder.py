"""The folder runs/NAME of a supervised job: its lock, and its events."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer.cluster.output import print_line
from trainer.errors import ConfigError, TrainerError
from trainer.untrusted import lock_own, open_own, read_file

_NOTED = re.compile(rb"([0-9]{1,10}) ([0-9a-f]{32})\n")
"""A supervisor's process and its job's id, which finds processes and names folders: nothing else is killed by it."""


class Events:
    """Events of a job: a line each for people, on standard error, and one with facts for programs.

    Args:
        path: the file to append to, events.jsonl; none where None.
        is_silent: whether to print nothing.
    """

    def __init__(self, path: Path | None, is_silent: bool = False) -> None:
        self._path, self._is_silent = path, is_silent

    def say(self, kind: str, text: str, *, is_silent: bool = False, **facts: Any) -> None:
        """Print a line, unless it is silent, and append an event to the file; a full disk does not end the job."""
        if not (is_silent or self._is_silent):
            with suppress(OSError, ValueError):  # nobody reads any more
                print_line(f"trainer run: {text}", sys.stderr)
        entry = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": kind, "text": text, **facts}
        if self._path is not None:
            with suppress(OSError), open_own(self._path, "a") as file:
                file.write(json.dumps(entry).encode() + b"\n")


@contextmanager
def locked(folder: Path, job: str) -> Iterator[str]:
    """Context in which no other process supervises this job.

    Its value is the id of the job whose supervisor was killed before it had ended it; empty if there is none.

    Args:
        folder: is made where it is missing.
        job: id of the job, which the lock notes while it is held.

    Raises:
        ConfigError: another process does.
        TrainerError: the folder cannot be made.
    """
    file = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        noted = _NOTED.match(read_file(file)[:60]) if file.exists() else None
        lock = lock_own(file, f"{os.getpid()} {job}\n")
    except OSError as error:
        raise TrainerError(f"{folder} cannot be written: {error.strerror}") from None
    if lock is None:
        holder = noted[1].decode() if noted else "another one"
        raise ConfigError(f"{folder} is already supervised by process {holder}; end that one, or choose another --name")
    with lock:
        with suppress(OSError):  # it is another user's
            os.fchmod(lock.fileno(), 0o600)
        try:
            yield noted[2].decode() if noted else ""
        finally:
            with suppress(OSError):
                lock.truncate(0)

"""The folder runs/NAME of a supervised job: its lock, the id by which its processes are found again, its events."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer.cluster.output import print_line
from trainer.errors import ConfigError, TrainerError
from trainer.files import write_atomically
from trainer.ops.supervise.hosts import Host, parse_hosts
from trainer.untrusted import lock_own, open_own, parse_json, read_file

_JOB = re.compile("[0-9a-f]{32}")
"""A job's id, which finds its processes and names its folders: nothing else may be killed and removed by it."""


@dataclass(frozen=True)
class Former:
    """A job that was under way when its supervisor ended."""

    job: str
    hosts: tuple[Host, ...]
    supervisor: int
    """Number of its process."""


class Events:
    """Events of a job: a line each for people, on standard error, and one with facts for programs.

    Args:
        path: the file to append to, events.jsonl.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def say(self, kind: str, text: str, **facts: Any) -> None:
        """Print one or more lines, and append an event to the file; a full disk does not end the job."""
        with suppress(OSError, ValueError):  # nobody reads any more
            print_line("\n".join(f"trainer run: {line}" for line in text.splitlines()), sys.stderr)
        self.note(kind, text=text, **facts)

    def note(self, kind: str, **facts: Any) -> None:
        """Append an event to the file."""
        entry = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": kind, **facts}
        with suppress(OSError), open_own(self._path, "a") as file:
            file.write(json.dumps(entry).encode() + b"\n")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context in which no other process supervises this job.

    Raises:
        ConfigError: another process does.
        TrainerError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_own(folder / "lock", f"{os.getpid()}\n")
        holder = "".join(filter(str.isdecimal, read_file(folder / "lock")[:20].decode(errors="replace")))
    except OSError as error:
        raise TrainerError(f"{folder} cannot be written: {error.strerror}") from None
    if lock is None:
        raise ConfigError(
            f"{folder} is already supervised by process {holder or 'another one'}; end that one, or choose another "
            "--name"
        )
    with lock:
        yield


def write_job(folder: Path, job: str, hosts: Sequence[Host]) -> None:
    """Note the job that is about to start; an empty `job` means that none is under way."""
    entry = {"job": job, "hosts": [[host.name, host.slots] for host in hosts], "supervisor": os.getpid()}
    write_atomically(folder / "job.json", json.dumps(entry) + "\n")


def read_former(folder: Path) -> Former | None:
    """Return the job that a former supervisor has not ended; None also where the file does not look like one."""
    with suppress(OSError, ValueError, LookupError, TypeError, OverflowError):
        entry = parse_json(read_file(folder / "job.json"))
        if _JOB.fullmatch(entry["job"]):
            # Whoever can write the file may not have ssh take a name for an option.
            hosts = parse_hosts(",".join(f"{name}:{slots}" for name, slots in entry["hosts"]))
            return Former(entry["job"], hosts, int(entry["supervisor"]))
    return None

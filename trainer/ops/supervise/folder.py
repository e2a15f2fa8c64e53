"""The folder runs/NAME of a supervised job: its lock, and the id under which its processes are found again."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ConfigError, TrainerError
from trainer.files import write_atomically
from trainer.ops.supervise.hosts import Host


@dataclass(frozen=True)
class Former:
    """A job that was under way when its supervisor ended."""

    job: str
    hosts: tuple[Host, ...]
    supervisor: int
    """Its process."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context in which no other process supervises this job.

    Raises:
        ConfigError: another one does.
        TrainerError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a+")
    except OSError as error:
        raise TrainerError(f"{folder} cannot be written: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "another one"
            raise ConfigError(
                f"{folder} is already supervised by process {holder}; end that one, or choose another --name"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def write_job(folder: Path, job: str, hosts: Sequence[Host]) -> None:
    """Note the job that is about to start; an empty one means that none is under way."""
    entry = {"job": job, "hosts": [[host.name, host.slots] for host in hosts], "supervisor": os.getpid()}
    write_atomically(folder / "job.json", json.dumps(entry) + "\n")


def read_former(folder: Path) -> Former | None:
    """Return the job that a former supervisor has not ended."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        entry = json.loads((folder / "job.json").read_text())
        if entry["job"]:
            hosts = tuple(Host(str(name), int(slots)) for name, slots in entry["hosts"])
            return Former(str(entry["job"]), hosts, int(entry["supervisor"]))
    return None

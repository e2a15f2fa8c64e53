"""What a scheduler has to do for `trainer submit`."""

from __future__ import annotations

import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from trainer.errors import ConfigError, TrainerError
from trainer.submit.job import Job


@dataclass(frozen=True)
class State:
    """Where a submitted job is."""

    name: str
    """In the scheduler's own words."""
    code: int | None = None
    """The exit code of a job that has ended; None while it waits or runs."""


class Scheduler(ABC):
    """Renders job files, and talks to a scheduler through its own commands."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """A line of the help."""
    suffix: ClassVar[str]
    """Of a job file."""
    launchers: ClassVar[tuple[str, ...]]
    """What can start the ranks; the first is the default."""
    lacks: ClassVar[Mapping[str, str]] = {}
    """Fields of `Job` that this scheduler has nothing for, and what to do instead."""

    @abstractmethod
    def render(self, job: Job) -> str:
        """Return the job file."""

    def problems(self, job: Job) -> list[str]:
        """Return what this scheduler cannot do for a job, a line each."""
        del job
        return []

    @abstractmethod
    def submit(self, path: Path) -> str:
        """Submit a job file; return the job's id.

        Raises:
            ConfigError: the scheduler's command is not installed here.
            TrainerError: the scheduler refuses the job.
        """

    @abstractmethod
    def state(self, job_id: str) -> State:
        """Ask where a job is.

        Raises:
            TrainerError: the scheduler does not know it.
        """

    @abstractmethod
    def logs(self, job: Job, job_id: str) -> list[Path]:
        """Return the files that a job has written so far, in the order in which they are shown."""

    @abstractmethod
    def cancel_command(self, job_id: str) -> Sequence[str]:
        """Return the command that ends a job."""


def call(*command: str) -> str:
    """Run a scheduler's command; return what it prints.

    Raises:
        ConfigError: it is not installed here.
        TrainerError: it fails.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is not installed here; submit where it is, or print the file with --dry-run")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise TrainerError(f"{command[0]} refuses: {words}")
    return done.stdout.strip()

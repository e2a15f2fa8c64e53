"""What a scheduler has to do for `trainer submit`."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import ClassVar

from trainer.errors import ConfigError, TrainerError
from trainer.ops.submit.job import Job

KUBERNETES_ONLY: Mapping[str, str] = {
    "claim": "its nodes share a file system",
    **dict.fromkeys(("namespace", "node_selector", "tolerations", "pull_secrets"), "it is an option for Kubernetes"),
}
"""What other schedulers lack."""


@dataclass(frozen=True)
class State:
    """Where a submitted job is."""

    name: str
    """In the scheduler's own words."""
    code: int | None = None
    """What `trainer submit --follow` returns for a job that has ended; None while it waits or runs."""
    detail: str = ""
    """Why it waits, or how it has ended."""
    waits: bool = False
    """Whether it is in the queue, for the first time or again under its id."""

    def __str__(self) -> str:
        return f"{self.name} ({self.detail})" if self.detail else self.name


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
    longest_name: ClassVar[int] = 63
    """Characters that the name of a job may have."""
    early_s: ClassVar[int] = 0
    """How long before the announced time the signal of the time limit may come."""

    def name_from(self, text: str) -> str:
        """Return a valid name for a job, made from that of its script."""
        return re.sub(r"^(?![A-Za-z])", "job-", re.sub(r"[^A-Za-z0-9_.-]+", "-", text))[: self.longest_name]

    @abstractmethod
    def render(self, job: Job) -> str:
        """Return the job file."""

    def problems(self, job: Job) -> list[str]:
        """Return what this scheduler cannot do for a job, a line each."""
        del job
        return []

    def runs_here(self, job: Job) -> bool:
        """Return whether a job runs in the folder that it is submitted from."""
        del job
        return True

    @abstractmethod
    def submit(self, path: Path) -> str:
        """Submit a job file; return the job's id.

        Raises:
            ConfigError: the scheduler's command is not installed here.
            TrainerError: the scheduler refuses the job.
        """

    @abstractmethod
    def states(self, job_id: str) -> Mapping[str, State]:
        """Ask where a job is; of an array, where each of its jobs is that the scheduler still knows.

        Raises:
            TrainerError: the scheduler does not know it.
        """

    def successors(self, job: Job, job_id: str) -> Sequence[str]:
        """Return the ids under which an ended job goes on, where the scheduler does not keep its id."""
        del job, job_id
        return ()

    @abstractmethod
    def new_output(self, job: Job, job_id: str, seen: dict[str, int]) -> str:
        """Return what a job has printed since the last call, in whole lines; those of a rank begin with its number.

        Args:
            seen: how much of each log has been returned; this call adds to it.
        """

    @abstractmethod
    def logs(self, job: Job, job_id: str) -> str:
        """Return where a job's output is, in words."""

    @abstractmethod
    def cancel_command(self, job_id: str) -> Sequence[str]:
        """Return the command that ends a job."""


class Watch:
    """Where a submitted job is, from one question to the next.

    Of an array, a scheduler may have forgotten a job that ended early when the last one ends.
    """

    def __init__(self, scheduler: Scheduler, job_id: str) -> None:
        self._scheduler, self._job_id = scheduler, job_id
        self._known: dict[str, State] = {}

    def state(self) -> State:
        """Ask; return the state of a job that waits or runs, else of the one with the largest exit code.

        Raises:
            TrainerError: the scheduler does not answer, or does not know the job.
        """
        now = self._scheduler.states(self._job_id)
        ended = {one: state for one, state in self._known.items() if state.code is not None}
        self._known = ended | dict(now)
        if not self._known:
            raise TrainerError(f"{self._scheduler.name} says nothing of job {self._job_id}")
        return max(self._known.values(), key=lambda state: math.inf if state.code is None else state.code)


def need(program: str) -> None:
    """Raise `ConfigError` where a program is not installed."""
    if shutil.which(program) is None:
        raise ConfigError(f"{program} is not installed here; submit where it is, or print the file with --dry-run")


def call(*command: str, stdin: Path | None = None) -> str:
    """Run a scheduler's command; return what it prints.

    Args:
        stdin: a file that it reads.

    Raises:
        ConfigError: it is not installed here.
        TrainerError: it fails.
    """
    need(command[0])
    text = stdin.read_text() if stdin else ""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise TrainerError(f"{command[0]} refuses: {words}")
    return done.stdout.strip()


def exit_detail(code: int) -> str:
    """Return the words for an exit code; none for 0."""
    return f"exit code {code}" if code else ""


def read_new(paths: Mapping[Path, str], seen: dict[str, int]) -> str:
    """Return the whole lines that have been appended to these files; a file may not be there yet.

    Args:
        paths: each with what its lines begin with.
    """
    found = ""
    for path, prefix in paths.items():
        if path.exists():
            with path.open("rb") as file:
                file.seek(seen.get(str(path), 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            seen[str(path)] = seen.get(str(path), 0) + len(whole)
            found += with_prefix(prefix, whole.decode(errors="replace"))
    return found


def with_prefix(prefix: str, text: str) -> str:
    """Return whole lines, each behind a prefix; a carriage return, as of a progress bar, begins none."""
    return "".join(f"{prefix}{line}\n" for line in text.removesuffix("\n").split("\n")) if text else ""


def fill(template: str, **parts: object) -> str:
    """Return a template with `{name}` replaced; where it is a line of its own, by whole lines at its depth."""

    def part(found: re.Match[str]) -> str:
        name = found["block"] or found["word"]
        if name not in parts:
            return found[0]
        return indent(str(parts[name]), found["depth"]) if found["block"] else str(parts[name])

    return re.sub(r"^(?P<depth> *)\{(?P<block>\w+)\}\n|\{(?P<word>\w+)\}", part, template, flags=re.MULTILINE)

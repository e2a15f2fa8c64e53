"""What `trainer submit` does with every scheduler: fill in a job file, submit it, say how it is ended."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.errors import ConfigError, TrainerError
from trainer.ops.submit.job import Job, duration, shell_command
from trainer.ops.submit.schedulers.template import fill, read

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


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """Fills in job files, and talks to a scheduler through its own commands."""

    name: str
    """Also of its template."""
    summary: str
    """A line of the help."""
    suffix: str
    """Of a job file."""
    submit_command: tuple[str, ...] = ()
    """What submits the job file whose path comes behind it."""
    cancel: tuple[str, ...] = ()
    """What ends the job whose id comes behind it."""
    launchers: tuple[str, ...] = ("mpirun",)
    """What can start the ranks; the first is the default."""
    lacks: Mapping[str, str] = field(default_factory=lambda: KUBERNETES_ONLY)
    """Fields of `Job` that this scheduler has nothing for, and what to do instead."""
    index: str = ""
    """The shell's variable for the number of a job of an array."""
    longest_name: int = 63
    """Characters that the name of a job may have."""
    early_s: int = 0
    """How long before the announced time the signal of the time limit may come."""
    runs_in_image: bool = False
    """Whether a job runs in the folder of an image, which it needs, not in the one that it is submitted from."""
    is_tried: bool = True
    """Whether such jobs have been run. Of another scheduler there is the template only; nothing submits its files."""

    def name_from(self, text: str) -> str:
        """Return a valid name for a job, made from that of its script."""
        return re.sub(r"^(?![A-Za-z])", "job-", re.sub(r"[^A-Za-z0-9_.-]+", "-", text))[: self.longest_name]

    def values(self, job: Job) -> dict[str, object]:
        """Return what goes into the template; None where a job has no such thing."""
        unproven = ["GPUs"] * bool(job.gpus_per_node) + ["containers"] * bool(job.image and not self.runs_in_image)
        return {
            **{name: value or None for name, value in vars(job).items()},
            "ranks": job.ranks,
            "cpus_per_node": job.cpus_per_node,
            "command": shell_command(job.command, f"${self.index}"),
            "index_in_name": f"-${self.index}" if job.array else "",
            "time": duration(job.time_s) if job.time_s else None,
            "told_after_s": job.time_s - job.grace_s if job.time_s else None,
            "not_run_with": f" Not run with {' and '.join(unproven)}." if unproven else "",
        }

    def render(self, job: Job) -> str:
        """Return the job file."""
        kind = ".yaml" if self.suffix == ".yaml" else ".sh"
        return fill(read(f"templates/{self.name}{kind}"), self.values(job))

    def problems(self, job: Job) -> list[str]:
        """Return what this scheduler cannot do for a job, a line each."""
        if self.runs_in_image and not job.image:
            return [f"--image is missing; {self.name} runs the ranks in containers, as in --image trainer:cpu"]
        return []

    def runs_here(self, job: Job) -> bool:
        """Return whether a job runs in the folder that it is submitted from."""
        del job
        return not self.runs_in_image

    def submit(self, path: Path) -> str:
        """Submit a job file; return the job's id.

        Raises:
            ConfigError: the scheduler's command is not installed here.
            TrainerError: the scheduler refuses the job.
        """
        return re.split(r"[.;]", call(*self.submit_command, str(path)))[0]

    def cancel_command(self, job_id: str) -> Sequence[str]:
        """Return the command that ends a job."""
        return (*self.cancel, job_id)

    def logs(self, job: Job, job_id: str) -> str:
        """Return where a job's output is, in words."""
        return f"runs/{job.name}-{job_id}{'-*' if job.array else ''}/"

    def states(self, job_id: str) -> Mapping[str, State]:
        """Ask where a job is; of an array, where each of its jobs is that the scheduler still knows.

        Raises:
            TrainerError: the scheduler does not know it.
        """
        raise NotImplementedError

    def successors(self, job: Job, job_id: str) -> Sequence[str]:
        """Return the ids under which an ended job goes on, where the scheduler does not keep its id."""
        del job, job_id
        return ()

    def new_output(self, job: Job, job_id: str, seen: dict[str, int]) -> str:
        """Return what a job has printed since the last call, in whole lines; those of a rank begin with its number.

        Args:
            seen: how much of each log has been returned; this call adds to it.
        """
        raise NotImplementedError


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
        ended = {job_id: state for job_id, state in self._known.items() if state.code is not None}
        self._known = ended | dict(now)
        if not self._known:
            raise TrainerError(f"{self._scheduler.name} says nothing of job {self._job_id}")
        return max(self._known.values(), key=lambda state: math.inf if state.code is None else state.code)


def call(*command: str) -> str:
    """Run a scheduler's command; return what it prints.

    Raises:
        ConfigError: it is not installed here.
        TrainerError: it fails.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is not installed here; submit where it is, or print the file with --dry-run")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise TrainerError(f"{command[0]} refuses: {words}")
    return done.stdout.strip()


def batch_problems(name: str, job: Job) -> list[str]:
    """Return what the schedulers whose script calls `mpirun` would read in another way."""
    problems = [
        f"--directive is {text!r}; valid is an option of the scheduler's own, as in --directive='-q gpu'"
        for text in job.directives
        if not text.startswith("-")
    ]
    if "0" in re.split("[-,]", job.array):
        problems.append(f"--array is {job.array!r}; {name} counts from 1")
    return problems


def read_new(paths: Mapping[Path, str], seen: dict[str, int]) -> str:
    """Return the whole lines that have been appended to these files; a file may not be there yet.

    Args:
        paths: each with what its lines begin with.
    """
    output = ""
    for path, prefix in paths.items():
        if path.exists():
            with path.open("rb") as file:
                file.seek(seen.get(str(path), 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            seen[str(path)] = seen.get(str(path), 0) + len(whole)
            output += with_prefix(prefix, whole.decode(errors="replace"))
    return output


def with_prefix(prefix: str, text: str) -> str:
    """Return whole lines, each behind a prefix; a carriage return, as of a progress bar, begins none."""
    return "".join(f"{prefix}{line}\n" for line in text.removesuffix("\n").split("\n")) if text else ""

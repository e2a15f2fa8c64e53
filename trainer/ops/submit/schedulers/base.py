"""What `trainer submit` does with every scheduler: fill in a job file, submit it, say how it is ended."""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.cluster.exit_codes import PREEMPTED
from trainer.errors import ConfigError, TrainerError
from trainer.ops.submit.job import Job, shell_command
from trainer.ops.submit.schedulers.template import fill, read, read_requeue

KUBERNETES_ONLY: Mapping[str, str] = {
    "claim": "its nodes share a file system",
    **dict.fromkeys(("namespace", "node_selector", "tolerations", "pull_secrets"), "it is an option for Kubernetes"),
}
"""What all other schedulers lack."""
BATCH_LACKS: Mapping[str, str] = {**KUBERNETES_ONLY, "image": "start the container runtime in the command"}
"""What schedulers lack whose script calls `mpirun`."""
ONE_JOB = "submit a job for each, under a --name of its own"
"""What to do in place of an array."""


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


class Scheduler:
    """Fills in job files, and talks to a scheduler through its own commands."""

    name: str
    """Its name on the command line, which its template has, too."""
    summary: str
    """Its line in the help."""
    suffix: str
    """What the name of a job file ends with."""
    submit_command: tuple[str, ...] = ()
    """The command that submits the job file named behind it. Empty where nobody has run such a file yet: then the file
    is only written."""
    cancel: tuple[str, ...] = ()
    """The command that ends the job whose id is named behind it."""
    launchers: tuple[str, ...] = ("mpirun",)
    """Programs that can start the ranks; the first is the default."""
    lacks: Mapping[str, str] = KUBERNETES_ONLY
    """Fields of `Job` that this scheduler cannot serve, each with what to do instead."""
    index: str = ""
    """Shell variable with the number of a job of an array."""
    longest_name: int = 63
    """How many characters the name of a job may have."""
    early_s: int = 0
    """How long before the announced time the signal of the time limit may come."""
    runs_in_image: bool = False
    """Whether a job needs an image, and runs in the image's folder instead of the folder that it is submitted from."""

    def name_from(self, text: str) -> str:
        """Return a valid name for a job, made from the name of its script."""
        return re.sub(r"^(?![A-Za-z])", "job-", re.sub(r"[^A-Za-z0-9_.-]+", "-", text))[: self.longest_name]

    def values(self, job: Job) -> dict[str, object]:
        """Return what a template may name; None where a job has no such thing."""
        unproven = ["GPUs"] * bool(job.gpus_per_node) + ["containers"] * bool(job.image and not self.runs_in_image)
        minutes = -(-(job.time_s or 0) // 60)
        return {
            **{name: value or None for name, value in vars(job).items()},
            "ranks": job.ranks,
            "cores": job.cpus_per_node or job.ranks_per_node,
            "and_gpus": f":ngpus={job.gpus_per_node}" if job.gpus_per_node else "",
            "and_memory": f":mem={job.memory_gib}gb" if job.memory_gib else "",
            "slot_memory_mib": -(-job.memory_gib * 1024 // job.ranks_per_node) if job.memory_gib else None,
            "command": shell_command(job.command, f"${self.index}"),
            "index_in_name": f"-${self.index}" if job.array else "",
            "array_in_brackets": f"[{job.array}]" if job.array else "",
            "time": _clock(job.time_s) if job.time_s else None,
            "hours_and_minutes": f"{minutes // 60}:{minutes % 60:02}" if minutes else None,
            "told_after_s": job.time_s - job.grace_s if job.time_s else None,
            "not_run_with": f" Not run with {' and '.join(unproven)}." if unproven else "",
            "preempted": PREEMPTED,
            "requeue": read_requeue(),
        }

    def render(self, job: Job) -> str:
        """Return the job file."""
        template = f"{self.name}.yaml" if self.suffix == ".yaml" else f"{self.name}.sh"
        return fill(read(f"templates/{template}"), self.values(job))

    def problems(self, job: Job) -> list[str]:
        """Return what this scheduler cannot do for a job, a line each."""
        problems = []
        if self.runs_in_image and not job.image:
            problems.append(f"--image is missing; {self.name} runs the ranks in containers, as in --image trainer:cpu")
        if self.launchers == ("mpirun",):
            problems += [
                f"--directive is {text!r}; valid is an option of the scheduler's own, as in --directive='-q gpu'"
                for text in job.directives
                if not text.startswith("-")
            ]
            if "0" in re.split("[-,]", job.array):
                problems.append(f"--array is {job.array!r}; {self.name} counts from 1")
        return problems

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

    def cancel_line(self, job_id: str) -> str:
        """Return the command that ends a job, as a line of shell."""
        return shlex.join((*self.cancel, job_id))

    def stem(self, job: Job, job_id: str) -> str:
        """Return what the names of a job's logs begin with; for an array, as a pattern."""
        return f"runs/{job.name}-{job_id}{'-*' if job.array else ''}"

    def logs(self, job: Job, job_id: str) -> str:
        """Return where a job's output is, in words: the script's log, and the folder with the ranks'."""
        return f"{self.stem(job, job_id)}.log, {self.stem(job, job_id)}/"

    def state(self, job_id: str, known: dict[str, State]) -> State:
        """Ask where a job is; for an array, return the state of a job that waits or runs, else of the worst end.

        Args:
            known: the states that earlier calls have learned, which this call updates. When the last job of an array
                ends, the scheduler may have forgotten those that ended early.

        Raises:
            TrainerError: the scheduler does not answer, or does not know the job.
        """
        now = self.states(job_id)
        for each in [each for each, state in known.items() if state.code is None]:
            del known[each]
        known.update(now)
        if not known:
            raise TrainerError(f"{self.name} says nothing of job {job_id}")
        return max(known.values(), key=lambda state: math.inf if state.code is None else state.code)

    def states(self, job_id: str) -> Mapping[str, State]:
        """Ask where a job is; for an array, where each of its jobs is that the scheduler still knows.

        Raises:
            TrainerError: the scheduler does not know it.
        """
        raise NotImplementedError

    def successors(self, job: Job, job_id: str) -> Sequence[str]:
        """Return the ids under which an ended job goes on, where the scheduler does not keep its id."""
        del job, job_id
        return ()

    def new_output(self, job: Job, job_id: str, seen: dict[str, int]) -> str:
        """Return the whole lines that a job has printed since the last call; a rank's lines begin with its number.

        Args:
            seen: how much of each log has been returned; this call adds to it.
        """
        raise NotImplementedError


def _clock(seconds: int) -> str:
    """Return a time as H:MM:SS, which Slurm, Grid Engine and PBS all take."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


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


def read_new(paths: Mapping[Path, str], seen: dict[str, int]) -> str:
    """Return the whole lines that were appended to these files since the last call; a file may not be there yet.

    Args:
        paths: each with what its lines begin with.
    """
    output = ""
    for path, prefix in paths.items():
        if path.exists():
            begin = seen.get(str(path), 0)
            with path.open("rb") as file:
                file.seek(begin)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            seen[str(path)] = begin + len(whole)
            output += with_prefix(prefix, whole.decode(errors="replace"))
    return output


def with_prefix(prefix: str, text: str) -> str:
    """Return whole lines, each behind a prefix; a carriage return, as of a progress bar, begins none."""
    return "".join(f"{prefix}{line}\n" for line in text.removesuffix("\n").split("\n")) if text else ""

"""What the schedulers have in common whose batch script calls `mpirun`: Grid Engine, PBS and LSF."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from trainer.ops.submit.job import Job, shell_command
from trainer.ops.submit.schedulers.base import KUBERNETES_ONLY, Scheduler, fill, read_new

_SCRIPT = """\
#!/bin/bash
# {nodes} x {ranks_per_node} ranks (nodes x ranks per node) for {product}. It was written by
#
#     {made_by}
#
# and is submitted, where that has not done it, by: mkdir -p runs && {submit} THIS-FILE
# {proof}
# Check first whether
{check_first}

{directives}

{start}
# What the ranks print is written at once.
export PYTHONUNBUFFERED=1
logs=runs/{name}-{id}
mkdir -p "$logs"
# The hosts of this job, as in a:2,b:2.
hosts={hosts}

# plm_rsh_agent: Open MPI starts its daemon on the other hosts through the scheduler, so that no ssh is needed.
# --output-filename: a folder for each rank, with its stdout and stderr.
{wrapper_note}
{timeout}mpirun -np {ranks} -H "$hosts" --bind-to none -x PATH -x PYTHONUNBUFFERED \\
    --mca plm_rsh_agent "{agent}" --output-filename "$logs" \\
    {command}
code=$?

{again}
exit "$code"
"""
_TIMEOUT = """\
# {grace_s} s before the time limit the ranks are told to save. mpirun hands USR2 on to them.
timeout --foreground --preserve-status --signal=USR2 {seconds} \\
    """
PATH_ONLY = """\
# Of the shell that has submitted, the job takes PATH only: everybody on the cluster can read what else is exported
# (qstat). Name what the job needs, and nothing secret, with --directive='-v NAME,NAME'.
"""
"""What is said before PATH is set, in a job file of Grid Engine or PBS."""


class Batch(Scheduler):
    """A batch script with one mpirun."""

    launchers = ("mpirun",)
    lacks: ClassVar[Mapping[str, str]] = {**KUBERNETES_ONLY, "image": "start the container runtime in the command"}
    product: ClassVar[str]
    submit_command: ClassVar[str]
    prefix: ClassVar[str]
    """What a line with an option begins with."""
    id: ClassVar[str]
    """The shell's words for the job's id."""
    index_variable: ClassVar[str]
    hosts: ClassVar[str]
    """The shell's words for the hosts of the job."""
    agent: ClassVar[str]
    """What starts a program on another host of the job."""
    wrapper: ClassVar[str] = ""
    """A line before the command, through which each rank is started."""
    wrapper_note: ClassVar[str] = ""
    """What it is for, as lines of a comment."""
    start: ClassVar[str] = ""
    """Lines before all others."""
    proof: ClassVar[str] = "Not run: it follows the documentation."
    """What the script was run against."""
    check_first: ClassVar[str]
    """What to look at before the first use, as lines of a comment."""

    @abstractmethod
    def directives(self, job: Job) -> list[str]:
        """Return the options of the job, each with a comment before it where it needs one."""

    @abstractmethod
    def again(self, job: Job) -> str:
        """Return lines that have the job queued again after exit code 75."""

    def render(self, job: Job) -> str:
        """Return the batch script."""
        lines = [line if line.startswith("# ") else f"{self.prefix} {line}" for line in self.directives(job)]
        lines += [f"{self.prefix} {text}" for text in job.directives]
        timeout = ""
        if job.time_s:
            timeout = fill(_TIMEOUT, grace_s=job.grace_s, seconds=job.time_s - job.grace_s)
        return fill(
            _SCRIPT, nodes=job.nodes, ranks_per_node=job.ranks_per_node, ranks=job.ranks, product=self.product,
            made_by=job.made_by, proof=self.proof, name=job.name, submit=self.submit_command,
            check_first=self.check_first, directives="".join(f"{line}\n" for line in lines), start=self.start,
            id=self.id + (f"-${self.index_variable}" if job.array else ""), hosts=self.hosts, agent=self.agent,
            timeout=timeout, again=self.again(job), wrapper_note=self.wrapper_note,
            command=f"{self.wrapper}{shell_command(job.command, f'${self.index_variable}')}\n",
        )  # fmt: skip

    def problems(self, job: Job) -> list[str]:
        """Refuse what the scheduler would read in another way."""
        problems = [
            f"--directive is {text!r}; valid is an option of the scheduler's own, as in --directive='-q gpu'"
            for text in job.directives
            if not text.startswith("-")
        ]
        if job.array and "0" in job.array.replace(",", "-").split("-"):
            problems.append(f"--array is {job.array!r}; {self.name} counts from 1")
        return problems

    def new_output(self, job: Job, job_id: str, seen: dict[str, int]) -> str:
        """Read what the ranks have written."""
        paths = sorted(Path().glob(f"{self.stem(job, job_id)}/*/rank.*/std*"))
        return read_new({path: f"[{path.parent.name.replace('.', ' ')}] " for path in paths}, seen)

    def logs(self, job: Job, job_id: str) -> str:
        """Return the folder with the ranks' output."""
        return f"{self.stem(job, job_id)}/"

    def stem(self, job: Job, job_id: str) -> str:
        """Return what the names of a job's logs begin with; of an array, as a pattern."""
        return f"runs/{job.name}-{job_id}{'-*' if job.array else ''}"

"""LSF: `bsub` with slots spread over hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from trainer.ops.submit.job import Job
from trainer.ops.submit.schedulers.base import State, call, exit_detail
from trainer.ops.submit.schedulers.batch import Batch


class LSF(Batch):
    """IBM Spectrum LSF 10.1."""

    name = "lsf"
    summary = "LSF: bsub and mpirun (not run)"
    product = "LSF"
    suffix = ".lsf"
    submit_command = "bsub <"
    prefix = "#BSUB"
    id = "$LSB_JOBID"
    index_variable = "LSB_JOBINDEX"
    hosts = "$(printf '%s:%s\\n' $LSB_MCPU_HOSTS | paste -sd,)"
    agent = "blaunch"
    check_first = "# the queue allows jobs on several hosts, and blaunch is on the PATH of the nodes.\n"

    lacks: ClassVar[Mapping[str, str]] = {**Batch.lacks, "memory_gib": "its unit is the site's: --directive='-M 16GB'"}

    def directives(self, job: Job) -> list[str]:
        """Return bsub's options."""
        array = f"[{job.array}]" if job.array else ""
        lines = [
            f'-J "{job.name}{array}"', "# Slots, a rank each, and how many of them on a host.", f"-n {job.ranks}",
            f'-R "span[ptile={job.ranks_per_node}]"', "# What ends with 75 has saved, and comes again.", '-Q "75"',
            "# A job whose host is lost comes again, too.", "-r", f"-o runs/{job.name}-%J.log",
        ]  # fmt: skip
        if job.cpus_per_rank:
            lines.append(f'-R "affinity[core({job.cpus_per_rank})]"')
        if job.gpus_per_node:
            lines += ["# Of each host.", f'-gpu "num={job.gpus_per_node}"']
        if job.time_s:
            minutes = -(-job.time_s // 60)
            lines += ["# Hours and minutes.", f"-W {minutes // 60}:{minutes % 60:02}"]
        return lines

    def again(self, job: Job) -> str:
        """Return a comment: the option -Q does it."""
        del job
        return "# LSF itself puts the job back into the queue at exit code 75 (-Q).\n"

    def submit(self, path: Path) -> str:
        """Submit with bsub, which reads the file from its input."""
        return call("bsub", stdin=path).partition("<")[2].partition(">")[0]

    def states(self, job_id: str) -> Mapping[str, State]:
        """Ask bjobs."""
        lines = call("bjobs", "-noheader", "-o", "jobindex stat exit_code", job_id).splitlines()
        return {index: _state(state, code) for index, state, code in map(str.split, lines)}

    def cancel_command(self, job_id: str) -> Sequence[str]:
        """Return the command that ends a job."""
        return ("bkill", job_id)


def _state(state: str, code: str) -> State:
    if state != "EXIT":
        return State(state, 0 if state == "DONE" else None)
    return State(state, 78 if code == "78" else 1, exit_detail(int(code)) if code.isdigit() else "")

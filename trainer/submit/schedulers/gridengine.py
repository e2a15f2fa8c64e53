"""Grid Engine: `qsub` with a parallel environment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from trainer.errors import TrainerError
from trainer.submit.job import Job, duration
from trainer.submit.schedulers.base import State, call
from trainer.submit.schedulers.batch import Batch


class GridEngine(Batch):
    """Son of Grid Engine, Open Grid Scheduler and others of the family."""

    name = "gridengine"
    summary = "Grid Engine: qsub and mpirun (not run)"
    product = "Grid Engine"
    suffix = ".sge"
    submit_command = "qsub"
    prefix = "#$"
    id = "$JOB_ID"
    index_variable = "SGE_TASK_ID"
    hosts = """$(awk '{print $1 ":" $2}' "$PE_HOSTFILE" | paste -sd,)"""
    agent = "qrsh -inherit -nostdin -V"
    check_first = (
        "# the parallel environment exists (qconf -spl), gives as many slots on each node as ranks are to run there\n"
        "# (allocation_rule), and has control_slaves TRUE.\n"
    )
    again = '# Exit code 99 puts the job back into the queue.\nif [ "$code" = 75 ]; then exit 99; fi\n'

    lacks: ClassVar[Mapping[str, str]] = {
        **Batch.lacks, "gpus_per_node": "name the site's resource: --directive='-l gpu=1'",
        "cpus_per_rank": "name the site's resource with --directive",
    }  # fmt: skip

    def directives(self, job: Job) -> list[str]:
        """Return qsub's options."""
        lines = ["-S /bin/bash", f"-N {job.name}", "# In this folder, with this environment.", "-cwd", "-V"]
        if not any(text.split()[0] == "-pe" for text in job.directives):
            lines += ["# The site's parallel environment; --directive='-pe NAME SLOTS' names another.",
                      f"-pe mpi {job.ranks}"]  # fmt: skip
        lines += ["# A job whose node is lost comes again.", "-r y", "-j y", "-o runs/"]
        if job.time_s:
            lines += [f"-l h_rt={duration(job.time_s)}"]
        if job.memory_gib:
            lines += ["# Of each slot.", f"-l h_vmem={-(-job.memory_gib * 1024 // job.ranks_per_node)}M"]
        if job.array:
            lines += [f"-t {job.array}"]
        return lines

    def problems(self, job: Job) -> list[str]:
        """Refuse what Grid Engine has no words of its own for."""
        problems = super().problems(job)
        if job.array and not re.fullmatch(r"\d+(-\d+)?", job.array):
            problems.append(f"--array is {job.array!r}; gridengine takes one range, as in 1-4")
        return problems

    def submit(self, path: Path) -> str:
        """Submit with qsub; an array's id comes with its range."""
        return call("qsub", "-terse", str(path)).partition(".")[0]

    def states(self, job_id: str) -> Mapping[str, State]:
        """Ask qstat, and the accounting for a job that it does not know any more."""
        try:
            call("qstat", "-j", job_id)
        except TrainerError:
            found = re.findall(r"^exit_status +(\d+)", call("qacct", "-j", job_id), re.MULTILINE)
            # There is a record for each start, and 99 is that of one which was queued again.
            code = max((int(one) for one in found if one != "99"), default=1)
            return {job_id: State("ended", code if code in (0, 78) else 1)}
        return {job_id: State("in the queue or running")}

    def cancel_command(self, job_id: str) -> Sequence[str]:
        """Return the command that ends a job."""
        return ("qdel", job_id)

"""PBS (OpenPBS, PBS Professional): `qsub` with chunks of nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from trainer.ops.submit.job import Job, duration
from trainer.ops.submit.schedulers.base import State, call, exit_detail
from trainer.ops.submit.schedulers.batch import PATH_ONLY, Batch

_AGAIN = """\
# A job may not put itself back into the queue (qrerun is the operator's): the same file is submitted again.
[ "$code" != 75 ] || qsub "runs/$PBS_JOBNAME.pbs" || exit 1
"""


class PBS(Batch):
    """OpenPBS and PBS Professional."""

    name = "pbs"
    summary = "PBS: qsub and mpirun (not run)"
    product = "PBS"
    suffix = ".pbs"
    submit_command = "qsub"
    prefix = "#PBS"
    id = "${PBS_JOBID%%.*}"
    index_variable = "PBS_ARRAY_INDEX"
    start = f'cd "$PBS_O_WORKDIR"\n{PATH_ONLY}export PATH=$PBS_O_PATH\n'
    hosts = """$(sort "$PBS_NODEFILE" | uniq -c | awk '{print $2 ":" $1}' | paste -sd,)"""
    agent = "pbs_tmrsh"
    check_first = (
        "# pbs_tmrsh is on the PATH of the nodes, and the site allows a job to submit another one. It submits\n"
        "# runs/NAME.pbs, so that this file has to be there.\n"
    )

    lacks: ClassVar[Mapping[str, str]] = {**Batch.lacks, "array": "submit a job for each, under a --name of its own"}

    def directives(self, job: Job) -> list[str]:
        """Return qsub's options."""
        chunk = [f"mpiprocs={job.ranks_per_node}", f"ncpus={job.cpus_per_node or job.ranks_per_node}"]
        if job.gpus_per_node:
            chunk.append(f"ngpus={job.gpus_per_node}")
        if job.memory_gib:
            chunk.append(f"mem={job.memory_gib}gb")
        lines = [
            f"-N {job.name}", "# A chunk is a node.", f"-l select={job.nodes}:{':'.join(chunk)}",
            "# Each on a host of its own.", "-l place=scatter", "# A job whose node is lost comes again.", "-r y",
            "-j oe", "-o runs/",
        ]  # fmt: skip
        if job.time_s:
            lines.append(f"-l walltime={duration(job.time_s)}")
        return lines

    def again(self, job: Job) -> str:
        """Return lines that submit the file again, where the ranks have saved."""
        del job
        return _AGAIN

    def submit(self, path: Path) -> str:
        """Submit with qsub."""
        return call("qsub", str(path)).partition(".")[0]

    def states(self, job_id: str) -> Mapping[str, State]:
        """Ask qstat, which knows ended jobs where the site keeps a history."""
        (job,) = json.loads(call("qstat", "-x", "-f", "-F", "json", job_id))["Jobs"].values()
        if job["job_state"] != "F":
            return {job_id: State(job["job_state"])}
        code = int(job.get("Exit_status", 1))
        return {job_id: State("F", code if code in (0, 75, 78) else 1, exit_detail(code))}

    def cancel_command(self, job_id: str) -> Sequence[str]:
        """Return the command that ends a job."""
        return ("qdel", job_id)

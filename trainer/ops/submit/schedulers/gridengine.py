"""Grid Engine: `qsub` with a parallel environment."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.cluster.exit_codes import MISTAKE, PREEMPTED
from trainer.errors import TrainerError
from trainer.ops.submit.job import Job
from trainer.ops.submit.schedulers.base import BATCH_LACKS, Scheduler, State, call, read_new

_ACCOUNTED_S = 16.0
"""Grid Engine writes its accounting every 15 s by default, that of other hosts before that of the script."""


class GridEngine(Scheduler):
    """Son of Grid Engine, Open Grid Scheduler and others of the family."""

    name = "gridengine"
    summary = "Grid Engine: qsub and mpirun"
    suffix = ".sge"
    submit_command = ("qsub", "-terse")
    cancel = ("qdel",)
    index = "SGE_TASK_ID"
    lacks: Mapping[str, str] = {
        **BATCH_LACKS,
        "gpus_per_node": "name the site's resource: --directive='-l gpu=1'",
        "cpus_per_rank": "name the site's resource with --directive",
    }

    def __init__(self) -> None:
        self._ended_at: dict[str, float] = {}
        """When qstat first did not know a job any more."""

    def values(self, job: Job) -> dict[str, object]:
        """Return what the template may name."""
        has_slots = any(text.split()[0] == "-pe" for text in job.directives)
        return super().values(job) | {
            "default_slots": None if has_slots else job.ranks,
            "task_in_name": "-$TASK_ID" if job.array else "",
            "task_option": '-t "$SGE_TASK_ID" ' if job.array else "",
        }

    def problems(self, job: Job) -> list[str]:
        """Return what Grid Engine has no option for, a line each."""
        problems = super().problems(job)
        if job.array and not re.fullmatch(r"\d+(-\d+)?", job.array):
            problems.append(f"--array is {job.array!r}; gridengine takes one range, as in 1-4")
        return problems

    def runs_here(self, job: Job) -> bool:
        """Return whether no directive names another folder."""
        return not any(text.split()[0] == "-wd" for text in job.directives)

    def states(self, job_id: str) -> Mapping[str, State]:
        """Ask qstat, and the accounting for a job that it does not know any more."""
        try:
            call("qstat", "-j", job_id)
        except TrainerError as error:
            if "do not exist" not in str(error):
                raise
            ended_at = self._ended_at.setdefault(job_id, time.monotonic())
            if time.monotonic() - ended_at < _ACCOUNTED_S:
                return {job_id: State("ended, not accounted for yet")}
            # There is a record of each start, after one of each host on which ranks were started.
            texts = re.split(r"^=+$", call("qacct", "-j", job_id), flags=re.MULTILINE)[1:]
            records = [dict(re.findall(r"^(\S+) +(\S+)", text, re.MULTILINE)) for text in texts]
            return {f"{job_id}.{record['taskid']}": _state(record) for record in records}
        return {job_id: State("in the queue or running")}

    def successors(self, job: Job, job_id: str) -> Sequence[str]:
        """Return the jobs that this one has submitted."""
        return [path.read_text().strip() for path in sorted(Path().glob(f"{self.stem(job, job_id)}/next"))]

    def new_output(self, job: Job, job_id: str, seen: dict[str, int]) -> str:
        """Read what the script has written; what the ranks print comes through mpirun."""
        return read_new(dict.fromkeys(sorted(Path().glob(f"{self.stem(job, job_id)}.log")), ""), seen)


def _state(record: Mapping[str, str]) -> State:
    code = int(record["exit_status"])
    detail = f"exit code {code}" if code else ""
    if record["failed"] != "0" or code not in (0, PREEMPTED, MISTAKE):
        return State("ended", 1, detail or f"failed: {record['failed']}")
    # A job that was preempted goes on as another one, whose exit code counts.
    return State("ended", 0 if code == PREEMPTED else code, detail)

"""Grid Engine: `qsub` with a parallel environment."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from trainer.errors import TrainerError
from trainer.ops.submit.job import Job, duration
from trainer.ops.submit.schedulers.base import State, call, exit_detail, fill, read_new
from trainer.ops.submit.schedulers.batch import PATH_ONLY, Batch

_ACCOUNTED_S = 16.0
"""Grid Engine writes its accounting every 15 s by default, that of other hosts before that of the script."""
_AGAIN = """\
# Exit code 99 would put the job back into the queue under its id, but Grid Engine 8.1.9 never starts it again on hosts
# other than the first that it has had (qstat -j: "until clean up of a previous run has finished"). So the job submits
# itself under another id, which `trainer submit --follow` finds in next. Where this host may not submit, it is 99.
again() {
    next=$(qsub -terse -v REPEATS_IN_A_ROW {task}"$0") || exit 99
    echo "${next%%.*}" > "$logs/next"
    echo "exit code $code: goes on as job ${next%%.*}"
    exit 75
}
# A host that starts no program any more is lost. The first one runs this script.
has_lost_a_host() {
    for host in $(awk 'NR > 1 {print $1}' "$PE_HOSTFILE"); do
        timeout 30 qrsh -inherit -nostdin "$host" true || return 0
    done
    return 1
}
# 75 says that the ranks have saved. A start that loses a host{or_told} is repeated three times in a row, and
# so is one that ends with a crash below Python, in a driver or a library (SIGABRT, SIGBUS, SIGSEGV).
export REPEATS_IN_A_ROW=${REPEATS_IN_A_ROW:-0}
case $code in
    0 | 78) ;;
    75) REPEATS_IN_A_ROW=0; again ;;
    *)
        REPEATS_IN_A_ROW=$((REPEATS_IN_A_ROW + 1))
        if [ "$REPEATS_IN_A_ROW" -le 3 ] && { {lost}; }; then again; fi
        ;;
esac
"""
_WRAPPER = """\
bash -c '( (trap "" USR2; while kill -0 $PPID && kill -0 $$; do sleep 5; done; kill -9 $$) > /dev/null 2>&1 & )
    exec "$@"' rank \\
"""
_WRAPPER_NOTE = """\
# bash -c: a rank is killed within 5 s when mpirun, or its daemon on another host, has gone. qdel and the time limit
# kill these at once, and ranks that do not exchange over MPI would stay.
"""


class GridEngine(Batch):
    """Son of Grid Engine, Open Grid Scheduler and others of the family."""

    name = "gridengine"
    summary = "Grid Engine: qsub and mpirun"
    product = "Grid Engine"
    suffix = ".sge"
    submit_command = "qsub"
    prefix = "#$"
    id = "$JOB_ID"
    index_variable = "SGE_TASK_ID"
    hosts = """$(awk '{print $1 ":" $2}' "$PE_HOSTFILE" | paste -sd,)"""
    agent = "qrsh -inherit -nostdin -V"
    wrapper = _WRAPPER
    wrapper_note = _WRAPPER_NOTE
    start = f"{PATH_ONLY}export PATH=$SGE_O_PATH\n"
    proof = (
        "Run on 2026-11-22 with Son of Grid Engine 8.1.9, on two hosts in containers (tests/docker/test_gridengine.py)."
    )
    check_first = (
        "# the parallel environment exists (qconf -spl), gives as many slots on each node as ranks are to run there\n"
        "# (allocation_rule), and has control_slaves TRUE; and whether the execution hosts may submit (qconf -ss).\n"
    )
    lacks: ClassVar[Mapping[str, str]] = {
        **Batch.lacks, "gpus_per_node": "name the site's resource: --directive='-l gpu=1'",
        "cpus_per_rank": "name the site's resource with --directive",
    }  # fmt: skip

    def __init__(self) -> None:
        self._ended_at: dict[str, float] = {}
        """When qstat first did not know a job any more."""

    def again(self, job: Job) -> str:
        """Return the lines that have a job go on that was told to save, or has lost a host."""
        lost, or_told = "[[ $code =~ ^13[459]$ ]] || has_lost_a_host", ""
        if job.time_s:
            lost = f'[ "$SECONDS" -ge {job.time_s - job.grace_s} ] || {lost}'
            or_told = " or fails after USR2"
        return fill(_AGAIN, task="-t $SGE_TASK_ID " if job.array else "", lost=lost, or_told=or_told)

    def directives(self, job: Job) -> list[str]:
        """Return qsub's options."""
        lines = ["-S /bin/bash", f"-N {job.name}", "# In this folder.", "-cwd"]
        if not any(text.split()[0] == "-pe" for text in job.directives):
            lines += ["# The site's parallel environment; --directive='-pe NAME SLOTS' names another.",
                      f"-pe mpi {job.ranks}"]  # fmt: skip
        lines += [
            "# A job whose first host is lost comes again where the site has set reschedule_unknown, and the job has a",
            "# checkpointing environment with `when r` (--directive='-ckpt NAME'): without one, it is deleted.",
            "-r y",
        ]
        lines += ["-j y", f"-o runs/{job.name}-$JOB_ID{'-$TASK_ID' if job.array else ''}.log"]
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

    def runs_here(self, job: Job) -> bool:
        """Return whether no directive names another folder."""
        return not any(text.split()[0] == "-wd" for text in job.directives)

    def submit(self, path: Path) -> str:
        """Submit with qsub; an array's id comes with its range."""
        return call("qsub", "-terse", str(path)).partition(".")[0]

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
            records = [dict(re.findall(r"^(\S+) +(\S+)", text, re.MULTILINE)) for text in _records(job_id)]
            return {f"{job_id}.{record['taskid']}": _state(record) for record in records}
        return {job_id: State("in the queue or running")}

    def successors(self, job: Job, job_id: str) -> Sequence[str]:
        """Return the jobs that this one has submitted."""
        found = sorted(Path().glob(f"{self.stem(job, job_id)}/next"))
        return [path.read_text().strip() for path in found]

    def new_output(self, job: Job, job_id: str, seen: dict[str, int]) -> str:
        """Read what the script has written; what the ranks print comes through mpirun."""
        return read_new(dict.fromkeys(sorted(Path().glob(f"{self.stem(job, job_id)}.log")), ""), seen)

    def logs(self, job: Job, job_id: str) -> str:
        """Return the script's log, and the folder with the ranks'."""
        return f"{self.stem(job, job_id)}.log, {super().logs(job, job_id)}"

    def cancel_command(self, job_id: str) -> Sequence[str]:
        """Return the command that ends a job."""
        return ("qdel", job_id)


def _records(job_id: str) -> list[str]:
    return re.split(r"^=+$", call("qacct", "-j", job_id), flags=re.MULTILINE)[1:]


def _state(record: Mapping[str, str]) -> State:
    code = int(record["exit_status"])
    detail = exit_detail(code)
    # A job that ended with 75 goes on as another one, whose exit code counts.
    if record["failed"] != "0" or code not in (0, 75, 78):
        return State("ended", 1, detail or f"failed: {record['failed']}")
    return State("ended", 0 if code == 75 else code, detail)

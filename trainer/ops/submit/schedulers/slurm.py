"""Slurm: `sbatch`, with one step of `srun` for all ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.cluster.exit_codes import MISTAKE
from trainer.ops.submit.job import Job, shell_command
from trainer.ops.submit.schedulers.base import Scheduler, State, call, read_new
from trainer.ops.submit.schedulers.template import fill, read

_ENDED = frozenset(
    ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"]
)

_OF_LOGS = {"-J": "--job-name", "-a": "--array", "-D": "--chdir", "-o": "--output"}
"""Options of sbatch that decide where a job's logs are."""
_CHARLIECLOUD = "charliecloud:"
"""What stands before the image's folder that Charliecloud is to run."""


class Slurm(Scheduler):
    """Slurm, from 22.05 on."""

    name = "slurm"
    summary = "Slurm: sbatch and srun, without or with containers (Pyxis, Apptainer, Charliecloud)"
    suffix = ".sbatch"
    submit_command = ("sbatch", "--parsable")
    cancel = ("scancel",)
    launchers = ("srun", "torchrun")
    index = "SLURM_ARRAY_TASK_ID"
    early_s = 60

    def values(self, job: Job) -> dict[str, object]:
        """Return what the template may name."""
        values = super().values(job)
        options, container = _container(job)
        if job.cpus_per_rank:
            options = f" --cpus-per-task={job.cpus_per_rank}{options}"  # srun does not take it over from sbatch
        is_torchrun = job.launcher == "torchrun"
        values |= {
            "mpi": "none" if is_torchrun else "pmix",
            "step_options": options,
            "rank_variables": "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID " if is_torchrun else "",
            "container": container,
            "threads": job.cpus_per_rank or 1,
        }
        return {**values, "torchrun": fill(read("templates/slurm-torchrun.sh"), values) if is_torchrun else None}

    def problems(self, job: Job) -> list[str]:
        """Return which directives Slurm would not read as options, or would lose the logs by, a line each."""
        return [
            f"--directive is {text!r}; valid is an option of sbatch's, as in --directive=--partition=gpu, "
            f"but not {', '.join(_OF_LOGS.values())}, by which the logs are found"
            for text in job.directives
            if not text.startswith("-") or _is_of_logs(text)
        ]

    def states(self, job_id: str) -> Mapping[str, State]:
        """Ask scontrol, which knows a job for some minutes after its end."""
        lines = call("scontrol", "-o", "show", "job", job_id).splitlines()
        jobs = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in lines]
        return {job["JobId"]: _state(job) for job in jobs}

    def new_output(self, job: Job, job_id: str, seen: dict[str, int]) -> str:
        """Read the script's own log, then the ranks'."""
        # Each job of an array has an id of its own, which its files' names have.
        ids = re.findall(r"JobId=(\d+)", call("scontrol", "-o", "show", "job", job_id)) if job.array else [job_id]
        paths: dict[Path, str] = {}
        for each in sorted(ids, key=int):
            folder, words = Path("runs", f"{job.name}-{each}"), [f"job {each}"] if job.array else []
            paths[folder.with_name(f"{folder.name}.log")] = _prefix(words)
            for path in sorted(folder.glob("rank-*.log"), key=_rank):
                paths[path] = _prefix([*words, f"rank {_rank(path)}"])
        return read_new(paths, seen)

    def stem(self, job: Job, job_id: str) -> str:
        """Return what the names of a job's logs begin with; each job of an array has an id of its own."""
        return f"runs/{job.name}-{'*' if job.array else job_id}"


def _container(job: Job) -> tuple[str, str]:
    """Return srun's options for a job's image, and what stands before the command instead; one is empty, or both."""
    image = shell_command((job.image.removeprefix(_CHARLIECLOUD),))
    if job.image.startswith(_CHARLIECLOUD):
        # The image is mounted read-only, so that a folder can only be bound where it has one: /mnt is in every image.
        environment = shell_command((f"--set-env={job.image.removeprefix(_CHARLIECLOUD)}/ch/environment",))
        return "", f'ch-run --join {environment} --bind "$PWD:/mnt" --cd /mnt {image} -- '
    if job.image.endswith(".sif") or "://" in job.image:
        return "", f'apptainer exec{" --nv" if job.gpus_per_node else ""} --bind "$PWD" --pwd "$PWD" {image} '
    if job.image:
        return f' --container-image={image} --container-mounts="$PWD:$PWD" --container-workdir="$PWD"', ""
    return "", ""


def _is_of_logs(directive: str) -> bool:
    word = re.split(r"[\s=]", directive)[0]
    # sbatch takes the beginning of a name as well.
    return word[:2] in _OF_LOGS or (len(word) > 3 and any(name.startswith(word) for name in _OF_LOGS.values()))


def _state(job: Mapping[str, str]) -> State:
    name = job["JobState"]
    if name == "PENDING":
        return State(name, detail=job["Reason"].replace("None", ""), waits=True)
    if name not in _ENDED:
        return State(name)
    code, signal = map(int, job["ExitCode"].split(":"))
    detail = f"signal {signal}" if signal else f"exit code {code}" if code else ""
    return State(name, 0 if name == "COMPLETED" else MISTAKE if code == MISTAKE else 1, detail)


def _prefix(words: Sequence[str]) -> str:
    return f"[{', '.join(words)}] " if words else ""


def _rank(path: Path) -> int:
    return int(path.stem.removeprefix("rank-"))

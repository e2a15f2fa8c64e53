"""Slurm: `sbatch`, with one step of `srun` for all ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.ops.submit.job import Job, duration, shell_command
from trainer.ops.submit.schedulers.base import KUBERNETES_ONLY, Scheduler, State, call, exit_detail, fill, read_new

_PROOF = "Run on 2026-11-22 with Slurm 22.05.8, on two nodes in containers (tests/docker/test_slurm.py)."
_ENDED = frozenset(
    ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"]
)

_OF_LOGS = {"-J": "--job-name", "-a": "--array", "-D": "--chdir", "-o": "--output"}
"""Options of sbatch's that say where a job's logs are."""

_HEAD = """\
#!/bin/bash
# {nodes} x {ranks_per_node} ranks (nodes x ranks per node) for Slurm. It was written by
#
#     {made_by}
#
# and is submitted, where that has not done it, by: mkdir -p runs && sbatch THIS-FILE
# {proof}

#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
# A task is a rank.
#SBATCH --ntasks-per-node={ranks_per_node}
"""
_KEEPING = """\
# {grace_s} s before the time limit USR2 comes to this script alone (B:), which hands it on to the ranks. It may come up
# to 60 s earlier. It is USR2, because NCCL may use USR1. Where the site has set PreemptParameters=send_user_signal, it
# comes before a preemption too.
#SBATCH --signal=B:USR2@{grace_s}
# A job that was preempted, or has lost a node, goes back into the queue, and its logs go on.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=runs/%x-%j.log
"""
_BODY = """
# USR2 asks for a save: the time limit is near. The trap is set before anything else, because without it a signal that
# comes early, before the ranks run, would end this script.
asked= cancelled=
trap asked=yes USR2
# TERM comes from scancel and scontrol requeue. Slurm then sends it to the ranks as well, and decides by itself whether
# the job runs again, so that this script only notes it.
trap cancelled=yes TERM

# What the ranks print is written at once.
export PYTHONUNBUFFERED=1
logs=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID
mkdir -p "$logs"
rm -f "$logs"/ready-*
errors=$logs/srun.log
# As in 17, or 17_3 in an array: the number of an array alone means all its jobs.
id=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
# slurmctld may not answer for a while, as while it is started again.
put_back() {
    for pause in 0 5 15 40; do
        sleep $pause
        [ ! "$cancelled" ] || break
        ! scontrol requeue "$id" || exit 0
    done
    exit "$1"
}
[ ! "$asked" ] || put_back 1

"""
_TORCHRUN = """\
# The ranks find one another as under torchrun, by its variables. There is no agent of torchrun's between srun and a
# rank: it would end at USR2, and would return 1 in place of the rank's exit code 75.
export MASTER_ADDR=$(hostname) MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export WORLD_SIZE={ranks} LOCAL_WORLD_SIZE={ranks_per_node} OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{threads}}}
"""
_WAIT = """\
step=$!

# bash runs a trap only between two commands or in wait, so the step is in the background. Once all ranks ignore USR2
# (ready-0, …), it is sent to the step again and again until that has ended, because they handle it only later.
while kill -0 "$step" 2> /dev/null; do
    [ ! "$asked" ] || [ "$(ls "$logs" | grep -c '^ready-')" -lt {ranks} ] || kill -USR2 "$step" 2> /dev/null
    sleep 5 &
    wait -n "$step" $!
done
wait "$step"
code=$?

# Of the rank that has ended first; others may abort because of it. 134, 135 and 139 come from a shell around a rank.
has_crashed() {
    grep -Em1 " tasks? [0-9,-]+: " "$errors" | grep -Eq ": (Segmentation fault|Bus error|Aborted)| exit code 13[459]$"
}
# srun's exit code is the largest, which may be that of a rank it has killed because of another one. Its messages have
# them all: 78 is a mistake of the user's, which another start would repeat, and 75 says that the ranks have saved.
cat "$errors"
for own in 78 75; do
    if grep -qx ".* exit code $own" "$errors"; then code=$own; break; fi
done
[ ! "$cancelled" ] || exit "$code"
unsaved=$logs/unsaved
case $code in
    0 | 78) exit "$code" ;;
    75) rm -f "$unsaved" ;;
    *)
        # After USR2, ranks may fail in place of saving. A lost node makes ranks on others fail, minutes before Slurm
        # notices it: a step on all nodes does not end then. One that has just come back may refuse its ranks. A crash
        # below Python, in a driver or a library, may be one that seldom comes.
        [ "$asked" ] || has_crashed || grep -q " launch failed: " "$errors" ||
            ! timeout 60 srun --overlap --ntasks-per-node=1 true 2> /dev/null || exit "$code"
        # Such a start is repeated three times in a row, because the next one may end like it.
        echo "exit code $code" >> "$unsaved"
        [ "$(wc -l < "$unsaved")" -le 3 ] || { echo "exit code $code: not saved four times in a row"; exit "$code"; }
        ;;
esac
echo "exit code $code: back into the queue"
put_back "$code"
"""


class Slurm(Scheduler):
    """Slurm, from 22.05 on."""

    name = "slurm"
    summary = "Slurm: sbatch and srun, without or with containers (Pyxis, Apptainer)"
    suffix = ".sbatch"
    launchers = ("srun", "torchrun")
    lacks = KUBERNETES_ONLY
    early_s = 60

    def render(self, job: Job) -> str:
        """Return the batch script."""
        head = _HEAD.format(
            name=job.name, nodes=job.nodes, ranks_per_node=job.ranks_per_node, made_by=job.made_by, proof=_proof(job)
        )
        body = _BODY
        if job.launcher == "torchrun":
            body += _TORCHRUN.format(ranks=job.ranks, ranks_per_node=job.ranks_per_node, threads=job.cpus_per_rank or 1)
        own = "".join(f"#SBATCH {text}\n" for text in job.directives)
        if own:
            own = "# --directive: of an option that comes twice, sbatch takes the last.\n" + own
        keeping, wait = _KEEPING.format(grace_s=job.grace_s), fill(_WAIT, ranks=job.ranks)
        return head + _resources(job) + keeping + own + body + _step(job) + wait

    def problems(self, job: Job) -> list[str]:
        """Refuse what Slurm would read in another way."""
        return [
            f"--directive is {text!r}; valid is an option of sbatch's, as in --directive=--partition=gpu, "
            f"but not {', '.join(_OF_LOGS.values())}, by which the logs are found"
            for text in job.directives
            if not text.startswith("-") or _is_of_logs(text)
        ]

    def submit(self, path: Path) -> str:
        """Submit with sbatch."""
        return call("sbatch", "--parsable", str(path)).partition(";")[0]

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
        for one in sorted(ids, key=int):
            folder, words = Path("runs", f"{job.name}-{one}"), [f"job {one}"] if job.array else []
            paths[folder.with_name(f"{folder.name}.log")] = _prefix(words)
            for path in sorted(folder.glob("rank-*.log"), key=_rank):
                paths[path] = _prefix([*words, f"rank {_rank(path)}"])
        return read_new(paths, seen)

    def logs(self, job: Job, job_id: str) -> str:
        """Return the script's log, and the folder with the ranks'."""
        stem = f"runs/{job.name}-{'*' if job.array else job_id}"
        return f"{stem}.log, {stem}/"

    def cancel_command(self, job_id: str) -> Sequence[str]:
        """Return the command that ends a job."""
        return ("scancel", job_id)


def _is_of_logs(directive: str) -> bool:
    word = re.split(r"[\s=]", directive)[0]
    # sbatch takes the beginning of a name as well.
    return word[:2] in _OF_LOGS or (len(word) > 3 and any(name.startswith(word) for name in _OF_LOGS.values()))


def _proof(job: Job) -> str:
    unproven = [text for is_used, text in ((job.gpus_per_node, "GPUs"), (job.image, "containers")) if is_used]
    return _PROOF + (f" Not run with {' and '.join(unproven)}." if unproven else "")


def _resources(job: Job) -> str:
    lines = []
    if job.cpus_per_rank:
        lines += [f"#SBATCH --cpus-per-task={job.cpus_per_rank}"]
    if job.gpus_per_node:
        lines += [
            "# Of the node, not of the task: each rank has to see all GPUs of its node, to exchange with the others.",
            f"#SBATCH --gpus-per-node={job.gpus_per_node}",
        ]
    if job.memory_gib:
        lines += ["# Of each node.", f"#SBATCH --mem={job.memory_gib}G"]
    if job.time_s:
        lines += ["# H:MM:SS; a shorter job may start earlier.", f"#SBATCH --time={duration(job.time_s)}"]
    if job.array:
        lines += ["# A job for each of these numbers.", f"#SBATCH --array={job.array}"]
    return "".join(f"{line}\n" for line in lines)


def _step(job: Job) -> str:
    """Return the command that starts all ranks, in the background."""
    mpi = "pmix" if job.launcher == "srun" else "none"
    options = [f"--mpi={mpi}", "--kill-on-bad-exit=1", "--wait=60", "--open-mode=append"]
    options.append('--output="$logs/rank-%t.log"')
    if job.cpus_per_rank:
        options.append(f"--cpus-per-task={job.cpus_per_rank}")
    command = shell_command(job.command, "$SLURM_ARRAY_TASK_ID")
    variables = "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID " if job.launcher == "torchrun" else ""
    prefix = f'bash -c \'trap "" USR2; : > "$0/ready-$SLURM_PROCID"; {variables}exec "$@"\' "$logs" '
    if job.image.endswith(".sif") or "://" in job.image:
        nv = " --nv" if job.gpus_per_node else ""
        prefix += f'apptainer exec{nv} --bind "$PWD" --pwd "$PWD" {shell_command((job.image,))} '
    elif job.image:
        options.append(f"--container-image={shell_command((job.image,))}")
        options.append('--container-mounts="$PWD:$PWD" --container-workdir="$PWD"')
    comments = {
        "srun": "# Slurm's PMIx is what Open MPI, and with it Horovod, finds the other ranks by.\n",
        "torchrun": "",
    }[job.launcher]
    comments += (
        "# --kill-on-bad-exit: a rank that fails ends the others, which would wait for it for ever.\n"
        "# --wait: so do ranks that are left for 60 s after the first has ended well.\n"
        "# trap: USR2 goes to every process of a rank. One that does not handle it, such as a wrapper around Python,\n"
        "# would be killed, so they start with USR2 ignored; trainer handles it once it runs. Each rank then writes\n"
        "# ready-N, because USR2 would still kill one whose trap is not set yet.\n"
    )
    return f'{comments}srun {" ".join(options)} \\\n    {prefix}{command} 2> "$errors" &\n'


def _state(job: Mapping[str, str]) -> State:
    name = job["JobState"]
    if name == "PENDING":
        return State(name, detail=job["Reason"].replace("None", ""), waits=True)
    if name not in _ENDED:
        return State(name)
    code, signal = map(int, job["ExitCode"].split(":"))
    detail = f"signal {signal}" if signal else exit_detail(code)
    return State(name, 0 if name == "COMPLETED" else 78 if code == 78 else 1, detail)


def _prefix(words: Sequence[str]) -> str:
    return f"[{', '.join(words)}] " if words else ""


def _rank(path: Path) -> int:
    return int(path.stem.removeprefix("rank-"))

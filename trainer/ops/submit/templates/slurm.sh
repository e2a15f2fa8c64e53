#!/bin/bash
# __nodes__ x __ranks_per_node__ ranks (nodes x ranks per node) for Slurm. It was written by
#
#     __made_by__
#
# and is submitted, where that has not done it, by: mkdir -p runs && sbatch THIS-FILE
# Run on 2026-11-22 with Slurm 22.05.8, on two nodes in containers (tests/docker/test_slurm.py).__not_run_with__

#SBATCH --job-name=__name__
#SBATCH --nodes=__nodes__
# A task is a rank.
#SBATCH --ntasks-per-node=__ranks_per_node__
#SBATCH --cpus-per-task=__cpus_per_rank__
# Of the node, not of the task: each rank has to see all GPUs of its node, to exchange with the others.
#SBATCH --gpus-per-node=__gpus_per_node__
# Of each node.
#SBATCH --mem=__memory_gib__G
# H:MM:SS; a shorter job may start earlier.
#SBATCH --time=__time__
# A job for each of these numbers.
#SBATCH --array=__array__
# __grace_s__ s before the time limit USR2 comes to this script alone (B:), which hands it on to the ranks. It may come up
# to 60 s earlier. It is USR2, because NCCL may use USR1. Where the site has set PreemptParameters=send_user_signal, it
# comes before a preemption too.
#SBATCH --signal=B:USR2@__grace_s__
# A job that was preempted, or has lost a node, goes back into the queue, and its logs go on.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=runs/%x-%j.log
# --directive: of an option that comes twice, sbatch takes the last.
#SBATCH __directives__

# USR2 asks for a save: the time limit is near. The trap is set before anything else, because without it a signal that
# comes early, before the ranks run, would end this script.
asked='' cancelled=''
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
command -v python3 > /dev/null || {
    echo "$(hostname) has no python3, which decides whether a job goes back into the queue"
    exit 1
}

__torchrun__
# --mpi: Slurm's PMIx is what Open MPI, and with it Horovod, finds the other ranks by. DDP under torchrun's variables
# needs none.
# --kill-on-bad-exit: a rank that fails ends the others, which would wait for it for ever.
# --wait: so do ranks that are left for 60 s after the first has ended well.
# trap: USR2 goes to every process of a rank. One that does not handle it, such as a wrapper around Python,
# would be killed, so they start with USR2 ignored; trainer handles it once it runs. Each rank then writes
# ready-N, because USR2 would still kill one whose trap is not set yet.
# shellcheck disable=SC2016  # what is between '' is expanded by the bash of each rank
srun --mpi=__mpi__ --kill-on-bad-exit=1 --wait=60 --open-mode=append --output="$logs/rank-%t.log"__step_options__ \
    bash -c 'trap "" USR2; : > "$0/ready-$SLURM_PROCID"; __rank_variables__exec "$@"' "$logs" __container____command__ 2> "$errors" &
step=$!

# bash runs a trap only between two commands or in wait, so the step is in the background. Once all ranks ignore USR2
# (ready-0, …), it is sent to the step again and again until that has ended, because they handle it only later.
ranks=__ranks__
while kill -0 "$step" 2> /dev/null; do
    [ ! "$asked" ] || [ "$(compgen -G "$logs/ready-*" | wc -l)" -lt $ranks ] || kill -USR2 "$step" 2> /dev/null
    sleep 5 &
    wait -n "$step" $!
done
wait "$step"
code=$?
cat "$errors"
[ ! "$cancelled" ] || exit "$code"

decide() {
    python3 - "$@" << 'REQUEUE'
__requeue__
REQUEUE
}
# A lost node makes ranks on others fail, minutes before Slurm notices it: a step on all nodes does not end then.
probe='timeout 60 srun --overlap --ntasks-per-node=1 true 2> /dev/null'
decide "$code" "$logs" "$asked" bash -c "$probe"
decision=$?
[ "$decision" != __preempted__ ] || put_back "$code"
exit "$decision"

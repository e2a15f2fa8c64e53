#!/bin/bash
# __nodes__ x __ranks_per_node__ ranks (nodes x ranks per node) for LSF. It was written by
#
#     __made_by__
#
# and is submitted, where that has not done it, by: mkdir -p runs && bsub < THIS-FILE
# Not run: it follows the documentation.
# Check first whether
# the queue allows jobs on several hosts, and blaunch is on the PATH of the nodes.

#BSUB -J "__name____array_in_brackets__"
# Slots, a rank each, and how many of them on a host.
#BSUB -n __ranks__
#BSUB -R "span[ptile=__ranks_per_node__]"
# What ends with __preempted__ has saved, and comes again.
#BSUB -Q "__preempted__"
# A job whose host is lost comes again, too.
#BSUB -r
#BSUB -o runs/__name__-%J.log
#BSUB -R "affinity[core(__cpus_per_rank__)]"
# Of each host.
#BSUB -gpu "num=__gpus_per_node__"
# Hours and minutes.
#BSUB -W __hours_and_minutes__
#BSUB __directives__

# What the ranks print is written at once.
export PYTHONUNBUFFERED=1
logs=runs/__name__-${LSB_JOBID}__index_in_name__
mkdir -p "$logs"
# The hosts of this job, as in a:2,b:2.
# shellcheck disable=SC2086  # they are words, a host and its slots in turn
hosts=$(printf '%s:%s\n' $LSB_MCPU_HOSTS | paste -sd,)

limit=()
# __grace_s__ s before the time limit the ranks are told to save. mpirun hands USR2 on to them.
limit=(timeout --foreground --preserve-status --signal=USR2 __told_after_s__)
# plm_rsh_agent: Open MPI starts its daemon on the other hosts through the scheduler, so that no ssh is needed.
# --output-filename: a folder for each rank, with its stdout and stderr.
"${limit[@]}" mpirun -np __ranks__ -H "$hosts" --bind-to none -x PATH -x PYTHONUNBUFFERED \
    --mca plm_rsh_agent "blaunch" --output-filename "$logs" \
    __command__
code=$?

# LSF itself puts the job back into the queue at exit code __preempted__ (-Q).
exit "$code"

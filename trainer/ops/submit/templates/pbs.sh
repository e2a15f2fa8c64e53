#!/bin/bash
# __nodes__ x __ranks_per_node__ ranks (nodes x ranks per node) for PBS. It was written by
#
#     __made_by__
#
# and is submitted, where that has not done it, by: mkdir -p runs && qsub THIS-FILE
# Not run: it follows the documentation.
# Check first whether
# pbs_tmrsh is on the PATH of the nodes, and the site allows a job to submit another one. It submits
# runs/NAME.pbs, so that this file has to be there.

#PBS -N __name__
# A chunk is a node.
#PBS -l select=__nodes__:mpiprocs=__ranks_per_node__:ncpus=__cores____and_gpus____and_memory__
# Each on a host of its own.
#PBS -l place=scatter
# A job whose node is lost comes again.
#PBS -r y
#PBS -j oe
#PBS -o runs/
#PBS -l walltime=__time__
#PBS __directives__

cd "$PBS_O_WORKDIR" || exit 1
# Of the shell that has submitted, the job takes PATH only: everybody on the cluster can read what else is exported
# (qstat). Name what the job needs, and nothing secret, with --directive='-v NAME,NAME'.
export PATH=$PBS_O_PATH
# What the ranks print is written at once.
export PYTHONUNBUFFERED=1
logs=runs/__name__-${PBS_JOBID%%.*}
mkdir -p "$logs"
# The hosts of this job, as in a:2,b:2.
hosts=$(sort "$PBS_NODEFILE" | uniq -c | awk '{print $2 ":" $1}' | paste -sd,)

limit=()
# __grace_s__ s before the time limit the ranks are told to save. mpirun hands USR2 on to them.
limit=(timeout --foreground --preserve-status --signal=USR2 __told_after_s__)
# plm_rsh_agent: Open MPI starts its daemon on the other hosts through the scheduler, so that no ssh is needed.
# --output-filename: a folder for each rank, with its stdout and stderr.
"${limit[@]}" mpirun -np __ranks__ -H "$hosts" --bind-to none -x PATH -x PYTHONUNBUFFERED \
    --mca plm_rsh_agent "pbs_tmrsh" --output-filename "$logs" \
    __command__
code=$?

# A job may not put itself back into the queue (qrerun is the operator's): the same file is submitted again.
[ "$code" != __preempted__ ] || qsub "runs/$PBS_JOBNAME.pbs" || exit 1
exit "$code"

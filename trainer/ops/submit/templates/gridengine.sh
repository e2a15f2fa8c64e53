#!/bin/bash
# __nodes__ x __ranks_per_node__ ranks (nodes x ranks per node) for Grid Engine. It was written by
#
#     __made_by__
#
# and is submitted, where that has not done it, by: mkdir -p runs && qsub THIS-FILE
# Run on 2026-11-22 with Son of Grid Engine 8.1.9, on two hosts in containers (tests/docker/test_gridengine.py).
# Check first whether
# the parallel environment exists (qconf -spl), gives as many slots on each node as ranks are to run there
# (allocation_rule), and has control_slaves TRUE; and whether the execution hosts may submit (qconf -ss).

#$ -S /bin/bash
#$ -N __name__
# In this folder.
#$ -cwd
# The site's parallel environment; --directive='-pe NAME SLOTS' names another.
#$ -pe mpi __default_slots__
# A job whose first host is lost comes again where the site has set reschedule_unknown, and the job has a
# checkpointing environment with `when r` (--directive='-ckpt NAME'): without one, it is deleted.
#$ -r y
#$ -j y
#$ -o runs/__name__-$JOB_ID__task_in_name__.log
#$ -l h_rt=__time__
# Of each slot.
#$ -l h_vmem=__slot_memory_mib__M
#$ -t __array__
#$ __directives__

# Of the shell that has submitted, the job takes PATH only: everybody on the cluster can read what else is exported
# (qstat). Name what the job needs, and nothing secret, with --directive='-v NAME,NAME'.
export PATH=$SGE_O_PATH
# What the ranks print is written at once.
export PYTHONUNBUFFERED=1
command -v python3 > /dev/null || {
    echo "$(hostname) has no python3, which decides whether a job goes on"
    exit 1
}
logs=runs/__name__-${JOB_ID}__index_in_name__
mkdir -p "$logs"
# The hosts of this job, as in a:2,b:2.
hosts=$(awk '{print $1 ":" $2}' "$PE_HOSTFILE" | paste -sd,)

limit=()
# __grace_s__ s before the time limit the ranks are told to save. mpirun hands USR2 on to them.
limit=(timeout --foreground --preserve-status --signal=USR2 __told_after_s__)
# plm_rsh_agent: Open MPI starts its daemon on the other hosts through the scheduler, so that no ssh is needed.
# --output-filename: a folder for each rank, with its stdout and stderr.
# bash -c: a rank is killed within 5 s when mpirun, or its daemon on another host, has gone. qdel and the time limit
# kill these at once, and ranks that do not exchange over MPI would stay.
# shellcheck disable=SC2016  # what is between '' is expanded by the bash of each rank
"${limit[@]}" mpirun -np __ranks__ -H "$hosts" --bind-to none -x PATH -x PYTHONUNBUFFERED \
    --mca plm_rsh_agent "qrsh -inherit -nostdin -V" --output-filename "$logs" \
    bash -c '( (trap "" USR2; while kill -0 $PPID && kill -0 $$; do sleep 5; done; kill -9 $$) > /dev/null 2>&1 & )
        exec "$@"' rank \
    __command__
code=$?

decide() {
    python3 - "$@" << 'REQUEUE'
__requeue__
REQUEUE
}
echo "${REPEATS_IN_A_ROW:-0}" > "$logs/unsaved"
# Whether the ranks were told to save.
told=
[ ${#limit[@]} = 0 ] || [ "$SECONDS" -lt "${limit[-1]}" ] || told=yes
# A host that starts no program any more is lost. The first one runs this script.
# shellcheck disable=SC2016  # what is between '' is expanded by the bash that probes
probe='for host in $(awk "NR > 1 {print \$1}" "$PE_HOSTFILE"); do
    timeout 30 qrsh -inherit -nostdin "$host" true || exit
done'
decide "$code" "$logs" "$told" bash -c "$probe"
code=$?
[ "$code" = __preempted__ ] || exit "$code"

# Exit code 99 would put the job back into the queue under its id, but Grid Engine 8.1.9 never starts it again on hosts
# other than the first that it has had (qstat -j: "until clean up of a previous run has finished"). So the job submits
# itself under another id, which `trainer submit --follow` finds in next. Where this host may not submit, it is 99.
REPEATS_IN_A_ROW=$(cat "$logs/unsaved")
export REPEATS_IN_A_ROW
next=$(qsub -terse -v REPEATS_IN_A_ROW __task_option__"$0") || exit 99
echo "${next%%.*}" > "$logs/next"
echo "goes on as job ${next%%.*}"
exit "$code"

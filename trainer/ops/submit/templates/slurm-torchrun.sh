# The ranks find one another as under torchrun, by its variables. There is no agent of torchrun's between srun and a
# rank: it would end at USR2, and would return 1 in place of the rank's exit code __preempted__.
MASTER_ADDR=$(hostname)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export WORLD_SIZE=__ranks__ LOCAL_WORLD_SIZE=__ranks_per_node__ OMP_NUM_THREADS=${OMP_NUM_THREADS:-__threads__}

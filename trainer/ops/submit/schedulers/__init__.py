"""The schedulers that `trainer submit` knows."""

from trainer.ops.submit.schedulers.base import Scheduler, State
from trainer.ops.submit.schedulers.gridengine import GRID_ENGINE
from trainer.ops.submit.schedulers.kubernetes import JOB_SET, MPI_JOB, TRAIN_JOB
from trainer.ops.submit.schedulers.slurm import SLURM
from trainer.ops.submit.schedulers.untried import LSF, PBS, TI_ONE

SCHEDULERS: dict[str, Scheduler] = {
    scheduler.name: scheduler for scheduler in (SLURM, MPI_JOB, TRAIN_JOB, JOB_SET, GRID_ENGINE, PBS, LSF, TI_ONE)
}

__all__ = ["SCHEDULERS", "Scheduler", "State"]

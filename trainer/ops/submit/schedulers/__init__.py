"""The schedulers that `trainer submit` knows, a file each."""

from trainer.ops.submit.schedulers.base import Scheduler, State, Watch
from trainer.ops.submit.schedulers.gridengine import GridEngine
from trainer.ops.submit.schedulers.jobset import JobSet
from trainer.ops.submit.schedulers.lsf import LSF
from trainer.ops.submit.schedulers.mpijob import MPIJob
from trainer.ops.submit.schedulers.pbs import PBS
from trainer.ops.submit.schedulers.slurm import Slurm
from trainer.ops.submit.schedulers.tione import TIONE
from trainer.ops.submit.schedulers.trainjob import TrainJob

SCHEDULERS: dict[str, Scheduler] = {
    one.name: one for one in (Slurm(), MPIJob(), TrainJob(), JobSet(), GridEngine(), PBS(), LSF(), TIONE())
}

__all__ = ["SCHEDULERS", "Scheduler", "State", "Watch"]

"""The schedulers that `trainer submit` knows, a file each."""

from trainer.submit.schedulers.base import Scheduler, State, Watch
from trainer.submit.schedulers.gridengine import GridEngine
from trainer.submit.schedulers.jobset import JobSet
from trainer.submit.schedulers.lsf import LSF
from trainer.submit.schedulers.mpijob import MPIJob
from trainer.submit.schedulers.pbs import PBS
from trainer.submit.schedulers.slurm import Slurm
from trainer.submit.schedulers.tione import TIONE
from trainer.submit.schedulers.trainjob import TrainJob

SCHEDULERS: dict[str, Scheduler] = {
    one.name: one for one in (Slurm(), MPIJob(), TrainJob(), JobSet(), GridEngine(), PBS(), LSF(), TIONE())
}

__all__ = ["SCHEDULERS", "Scheduler", "State", "Watch"]

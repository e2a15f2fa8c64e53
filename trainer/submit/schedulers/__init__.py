"""The schedulers that `trainer submit` knows, a file each."""

from trainer.submit.schedulers.base import Scheduler, State
from trainer.submit.schedulers.jobset import JobSet
from trainer.submit.schedulers.mpijob import MPIJob
from trainer.submit.schedulers.slurm import Slurm
from trainer.submit.schedulers.trainjob import TrainJob

SCHEDULERS: dict[str, Scheduler] = {one.name: one for one in (Slurm(), MPIJob(), TrainJob(), JobSet())}

__all__ = ["SCHEDULERS", "Scheduler", "State"]

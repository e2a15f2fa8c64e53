"""The schedulers that `trainer submit` knows, a file each."""

from trainer.submit.schedulers.base import Scheduler, State
from trainer.submit.schedulers.slurm import Slurm

SCHEDULERS: dict[str, Scheduler] = {one.name: one for one in (Slurm(),)}

__all__ = ["SCHEDULERS", "Scheduler", "State"]

"""The schedulers that `trainer submit` knows."""

from trainer.ops.submit.schedulers.base import Scheduler, State
from trainer.ops.submit.schedulers.gridengine import GridEngine
from trainer.ops.submit.schedulers.kubernetes import JobSet, MpiJob, TrainJob
from trainer.ops.submit.schedulers.slurm import Slurm
from trainer.ops.submit.schedulers.untried import Lsf, Pbs, TiOne

_KINDS = (Slurm, MpiJob, TrainJob, JobSet, GridEngine, Pbs, Lsf, TiOne)
SCHEDULERS: dict[str, Scheduler] = {kind.name: kind() for kind in _KINDS}

__all__ = ["SCHEDULERS", "Scheduler", "State"]

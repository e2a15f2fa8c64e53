"""Trains a PyTorch model on many processes, correctly and fast.

`Trainer` for who hands the loop over; `prepare` and `ShardedLoader` for who keeps it.
"""

from trainer.callbacks import Callback, EpochRecord, Evaluation, Pulse
from trainer.config import TrainerConfig
from trainer.data.loader import InMemory, ShardedLoader
from trainer.errors import ConfigError, DataError, TrainerError
from trainer.failure import report_failures
from trainer.metrics import accuracy
from trainer.preparation import prepare
from trainer.trainer import Trainer
from trainer.world import World, current_world

__all__ = [
    "Callback",
    "ConfigError",
    "DataError",
    "EpochRecord",
    "Evaluation",
    "InMemory",
    "Pulse",
    "ShardedLoader",
    "Trainer",
    "TrainerConfig",
    "TrainerError",
    "World",
    "accuracy",
    "current_world",
    "prepare",
    "report_failures",
]

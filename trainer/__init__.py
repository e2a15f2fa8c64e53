"""trainer: trains a PyTorch model across processes, correctly and fast, through Horovod or torch.distributed.

`init` returns the handle for a training loop of your own. `Trainer` runs the loop for you.

Names are imported on first use, so that tools which need no PyTorch start without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.checkpoint.run.checkpoints import Checkpoints
    from trainer.cluster.world import World, current_world
    from trainer.config import CheckpointConfig, FsdpConfig, RunConfig, TrainerConfig
    from trainer.data.loader import InMemory, ShardedLoader
    from trainer.data.stream import StreamLoader
    from trainer.errors import ConfigError, DataError, LaunchError, TrainerError
    from trainer.fit.trainer import Trainer
    from trainer.loop.metrics import accuracy
    from trainer.ops.launch.launch import launch
    from trainer.report.callback import Callback, EpochRecord, Evaluation, FitContext, ProgressEvent, UpdateRecord
    from trainer.run import Run, init
    from trainer.strategies.base import Strategy
    from trainer.watch.failure import report_failures

_MODULES = {
    "report.callback": ("Callback", "EpochRecord", "Evaluation", "FitContext", "ProgressEvent", "UpdateRecord"),
    "checkpoint.run.checkpoints": ("Checkpoints",),
    "config": ("CheckpointConfig", "FsdpConfig", "RunConfig", "TrainerConfig"),
    "data.loader": ("InMemory", "ShardedLoader"),
    "data.stream": ("StreamLoader",),
    "errors": ("ConfigError", "DataError", "LaunchError", "TrainerError"),
    "watch.failure": ("report_failures",),
    "cluster.world": ("World", "current_world"),
    "loop.metrics": ("accuracy",),
    "ops.launch.launch": ("launch",),
    "run": ("Run", "init"),
    "strategies.base": ("Strategy",),
    "fit.trainer": ("Trainer",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Callback",
    "CheckpointConfig",
    "Checkpoints",
    "ConfigError",
    "DataError",
    "EpochRecord",
    "Evaluation",
    "FitContext",
    "FsdpConfig",
    "InMemory",
    "LaunchError",
    "ProgressEvent",
    "Run",
    "RunConfig",
    "ShardedLoader",
    "Strategy",
    "StreamLoader",
    "Trainer",
    "TrainerConfig",
    "TrainerError",
    "UpdateRecord",
    "World",
    "accuracy",
    "current_world",
    "init",
    "launch",
    "report_failures",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"trainer.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

"""trainer: trains a PyTorch model across processes, correctly and fast, through Horovod or torch.distributed.

`init` returns the handle for a training loop of your own. `Trainer` runs the loop for you.

Names are imported on first use, so that tools which need no PyTorch start without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # with `as`, which tells type checkers that a name is public
    from trainer.checkpoint.run.checkpoints import Checkpoints as Checkpoints
    from trainer.cluster.world import World as World
    from trainer.cluster.world import current_world as current_world
    from trainer.config import CheckpointConfig as CheckpointConfig
    from trainer.config import FsdpConfig as FsdpConfig
    from trainer.config import RunConfig as RunConfig
    from trainer.config import TrainerConfig as TrainerConfig
    from trainer.data.loader import InMemory as InMemory
    from trainer.data.loader import ShardedLoader as ShardedLoader
    from trainer.data.stream import StreamLoader as StreamLoader
    from trainer.errors import ConfigError as ConfigError
    from trainer.errors import DataError as DataError
    from trainer.errors import LaunchError as LaunchError
    from trainer.errors import TrainerError as TrainerError
    from trainer.fit.trainer import Trainer as Trainer
    from trainer.loop.metrics import accuracy as accuracy
    from trainer.ops.launch.launch import launch as launch
    from trainer.report.callback import Callback as Callback
    from trainer.report.callback import EpochRecord as EpochRecord
    from trainer.report.callback import Evaluation as Evaluation
    from trainer.report.callback import FitContext as FitContext
    from trainer.report.callback import ProgressEvent as ProgressEvent
    from trainer.report.callback import UpdateRecord as UpdateRecord
    from trainer.run import Run as Run
    from trainer.run import init as init
    from trainer.strategies.base import Strategy as Strategy
    from trainer.watch.failure import report_failures as report_failures

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
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"trainer.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

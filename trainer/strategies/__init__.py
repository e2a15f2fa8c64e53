"""Strategies by name. A strategy's file is imported when it is chosen, not before."""

from __future__ import annotations

import importlib

from trainer.config import chosen_strategy
from trainer.errors import ConfigError
from trainer.strategies.base import Strategy
from trainer.world import World

_REGISTRY = {
    "single": ("trainer.strategies.single", "SingleStrategy"),
    "horovod": ("trainer.strategies.horovod", "HorovodStrategy"),
    "ddp": ("trainer.strategies.ddp", "DDPStrategy"),
    "ring": ("trainer.strategies.ring", "RingStrategy"),
    "data_parallel": ("trainer.strategies.data_parallel", "DataParallelStrategy"),
    "parameter_server": ("trainer.strategies.parameter_server", "ParameterServerStrategy"),
}
# Which strategy belongs to a launcher; whatever is not named here speaks MPI, or Horovod's own protocol.
_BY_LAUNCHER = {"python": "single", "torchrun": "ddp"}

NAMES = ("auto", *_REGISTRY)


def choose_strategy(name: str, world: World) -> str:
    """The strategy that `name` stands for: "auto" goes by TRAINER_STRATEGY, then by how the process was launched.

    Raises:
        ConfigError: there is no such strategy; the text lists those that there are.
    """
    if name == "auto" and (chosen := chosen_strategy()) is not None:
        name = chosen
    if name == "auto":
        # `srun -n 1` needs no PMIx, which Horovod would ask for.
        alone = world.launcher == "srun" and world.size == 1
        return "single" if alone else _BY_LAUNCHER.get(world.launcher, "horovod")
    if name not in _REGISTRY:
        raise ConfigError(f"strategy is {name!r}; valid are {', '.join(NAMES)}")
    return name


def has_nccl() -> bool:
    """Whether the installed Horovod, if there is one, was built with NCCL; starts nothing."""
    try:
        import horovod.torch as hvd
    except ImportError:
        return False
    return bool(hasattr(hvd, "nccl_built") and hvd.nccl_built())


def make_strategy(name: str, world: World) -> Strategy:
    """Joins the job with the strategy of that name. Collective.

    Raises:
        ConfigError: there is no such strategy, its package is missing, or it does not fit the launcher.
    """
    module, kind = _REGISTRY[choose_strategy(name, world)]
    strategy: Strategy = getattr(importlib.import_module(module), kind)(world)
    return strategy

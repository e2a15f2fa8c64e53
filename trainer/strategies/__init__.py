"""Strategies by name, or by `module:Class`. A strategy's module is imported when it is chosen, not before."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import ModuleType

from trainer.cluster.launchers import LAUNCHERS
from trainer.cluster.world import World
from trainer.errors import ConfigError
from trainer.strategies.base import Strategy

_REGISTRY = {
    "single": ("trainer.strategies.single", "SingleStrategy"),
    "horovod": ("trainer.strategies.horovod", "HorovodStrategy"),
    "ddp": ("trainer.strategies.ddp", "DDPStrategy"),
    "fsdp": ("trainer.strategies.fsdp", "FSDPStrategy"),
}
NAMES = ("auto", *_REGISTRY)

wrapper: Callable[[Strategy], Strategy] | None = None
"""Replaces each strategy by which a run joins, so that scripts/timed.py can measure a script that it runs unchanged."""


def choose_strategy(name: str, world: World) -> str:
    """Return the strategy that `name` stands for: "auto" is TRAINER_STRATEGY if that is set, else chosen by launcher.

    Raises:
        ConfigError: there is no such strategy; the text lists the valid names.
    """
    if name == "auto":
        name = os.environ.get("TRAINER_STRATEGY") or name
    if name == "auto":
        # `srun -n 1` needs no PMIx, which Horovod would require.
        launcher = LAUNCHERS[world.launcher]
        return "single" if launcher.is_scheduler and world.size == 1 else launcher.strategy
    if name not in _REGISTRY and ":" not in name:
        raise ConfigError(f"strategy is {name!r}; valid are {', '.join(NAMES)}, and module:Class for one of your own")
    return name


def has_nccl() -> bool:
    """Return whether Horovod is installed and was built with NCCL. Starts nothing."""
    try:
        import horovod.torch as hvd
    except ImportError:
        return False
    return bool(hasattr(hvd, "nccl_built") and hvd.nccl_built())


def make_strategy(name: str, world: World) -> Strategy:
    """Join the job with the strategy of that name. Collective.

    Raises:
        ConfigError: there is no such strategy, its package is missing, or it does not fit the launcher.
    """
    name = choose_strategy(name, world)
    module, kind = _REGISTRY.get(name) or name.split(":", 1)
    made = getattr(_import(module, name), kind, None)
    if not (isinstance(made, type) and issubclass(made, Strategy)):
        raise ConfigError(f"strategy is {name!r}, and {module} has no subclass of trainer.Strategy of that name")
    return made(world)


def _import(module: str, name: str) -> ModuleType:
    """Import the module of a strategy; an error within a user's module stays a traceback."""
    if not all(map(str.isidentifier, module.split("."))):
        raise ConfigError(f"strategy is {name!r}, whose module is {module!r}; valid is module:Class")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if name in _REGISTRY or not f"{module}.".startswith(f"{error.name}."):
            raise  # a package that the module imports
        raise ConfigError(f"strategy is {name!r}: {error}") from None


def wrapped(strategy: Strategy) -> Strategy:
    """Return the strategy, passed through `wrapper` if that is set."""
    return strategy if wrapper is None else wrapper(strategy)

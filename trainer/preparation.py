"""From a model and an optimizer to ones that train with all other ranks."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.agreement import check_agreement, check_devices, describe_model, describe_optimizer
from trainer.batch_norm import globalize
from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.failure import report_failures
from trainer.strategies import choose_strategy, has_nccl, make_strategy
from trainer.strategies.base import Strategy
from trainer.timing import step_timer
from trainer.tuning import machine, share_machine
from trainer.world import World, current_world


def prepare(
    model: nn.Module, optimizer: Optimizer, *, strategy: str | Strategy = "auto", config: TrainerConfig | None = None
) -> tuple[nn.Module, Optimizer]:
    """For who keeps the loop: the same model and optimizer, training with all other ranks.

    Afterwards the model is on this rank's device with rank 0's weights, and `optimizer.step()` applies the
    mean of all ranks' gradients. The learning rate is left alone; `trainer.schedule` scales and warms it up.

    Args:
        model: its parameters are moved in place.
        optimizer: over the model's parameters.
        strategy: a name out of `trainer.strategies.NAMES`; "auto" goes by how the process was launched.
        config: what concerns the exchange: compression, reduction, sync_batch_norm, device and the like.

    Returns:
        The model to call and the optimizer to step.

    Raises:
        ConfigError: the strategy cannot be had, or the ranks disagree about the model.
    """
    config = config or TrainerConfig()
    joined = join(strategy, config)
    return wrap(joined, model, optimizer, config)


def join(strategy: str | Strategy, config: TrainerConfig) -> Strategy:
    """Joins the job that this process was launched into, and says on rank 0 what was tuned. Collective."""
    report_failures()
    if isinstance(strategy, Strategy):
        return strategy
    world = _with_usable_device(strategy, current_world(config.device), config)
    if world.device.type == "cuda":
        # What user code calls plain "cuda" is this rank's GPU, not everybody's first.
        torch.cuda.set_device(world.device)
    joined = make_strategy(strategy, world)
    places = joined.all_gather_object((world.host, machine()))
    tuning = dict(joined.tuning) | share_machine(world, [one for _, one in places])
    if joined.world.is_root:
        tuned = "; ".join(f"{name} {choice}" for name, choice in tuning.items())
        place = f"{world.size} ranks on {_per_host(places)}; " if world.size > 1 else ""
        line = f"{place}{joined.description}{'; tuned: ' + tuned if tuned else ''}"
        print(f"trainer: {line}", file=sys.stderr, flush=True)
    return joined


def _per_host(places: list[tuple[str, str]]) -> str:
    """Ranks per host, as in "a: 2, b: 2", in the order of the ranks."""
    return ", ".join(f"{host}: {ranks}" for host, ranks in Counter(host for host, _ in places).items())


def _with_usable_device(strategy: str, world: World, config: TrainerConfig) -> World:
    """The world on its CPU where device "auto" found GPUs that these ranks cannot use; says so on rank 0."""
    gpus = torch.cuda.device_count()
    if config.device != "auto" or gpus == 0:
        return world
    reason = None
    if world.device.type == "cpu":
        reason = f"this host has {gpus} GPU{'s' * (gpus > 1)} for {world.local_size} ranks"
    elif choose_strategy(strategy, world) == "horovod" and not has_nccl():
        reason = (
            "this Horovod was built without NCCL (`python scripts/build_horovod.py --gpu nccl`, with nvcc on the PATH)"
        )
    if reason is None:
        return world
    if world.is_root:
        print(f"trainer: WARNING: training on the CPU, because {reason}", file=sys.stderr, flush=True)
    return replace(world, device=torch.device("cpu"))


def wrap(
    strategy: Strategy, model: nn.Module, optimizer: Optimizer, config: TrainerConfig
) -> tuple[nn.Module, Optimizer]:
    """Compares the model on all ranks, then hands it to the strategy. Collective."""
    _check_parameters(model, optimizer)
    check_devices(strategy)
    check_agreement(
        strategy,
        {
            **describe_model(model),
            **describe_optimizer(optimizer),
            "PyTorch's version": torch.__version__,
            "the kind of device": strategy.world.device.type,
            **_settings(config),
        },
    )
    model.to(strategy.world.device)
    if optimizer.state:
        # State loaded from a checkpoint follows its parameters to the device.
        optimizer.load_state_dict(optimizer.state_dict())
    if config.sync_batch_norm:
        globalize(model, strategy.all_reduce)
    if config.compile:
        model.compile()
    timer = step_timer()
    if timer is None:
        return strategy.prepare(model, optimizer, config)
    timer.watch_model(model)
    prepared, wrapped = strategy.prepare(model, optimizer, config)
    timer.watch_optimizer(strategy, wrapped)
    return prepared, wrapped


def _check_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    strangers = len(held - {id(parameter) for parameter in model.parameters()})
    if strangers:
        raise ConfigError(
            f"the optimizer holds {strangers} parameters that the model does not; they would not be "
            "exchanged: make them part of the model"
        )


def _settings(config: TrainerConfig) -> dict[str, object]:
    # How often a rank prints and how many processes load for it is its own affair.
    private = ("log_every_s", "workers")
    return {f"setting {name}": value for name, value in config.as_dict().items() if name not in private}

"""Preparation: joins the job and wraps a model and an optimizer for training across its ranks."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.config import TrainerConfig
from trainer.consistency import check_consistency, check_devices, describe_model, describe_optimizer
from trainer.errors import ConfigError
from trainer.launch.failure import report_failures
from trainer.launch.network import machine_id
from trainer.launch.world import World, current_world
from trainer.profiling.step_timer import step_timer
from trainer.strategies import choose_strategy, has_nccl, make_strategy
from trainer.strategies.base import Strategy
from trainer.sync_batch_norm import convert_sync_batch_norm
from trainer.tuning.host import share_machine


def prepare(
    model: nn.Module, optimizer: Optimizer, *, strategy: str | Strategy = "auto", config: TrainerConfig | None = None
) -> tuple[nn.Module, Optimizer]:
    """Wrap model and optimizer for your own training loop. Collective.

    Afterwards the model is on this rank's device with rank 0's weights, and `optimizer.step()` applies the gradient
    averaged over all ranks. The learning rate is not changed; `trainer.lr_schedule` scales it and warms it up.

    Args:
        model: its parameters are moved in place.
        optimizer: over the model's parameters.
        strategy: a name out of `trainer.strategies.NAMES`; "auto" chooses by launcher.
        config: compression, reduction, sync_batch_norm, compile, dynamic_graph and device are used here.

    Returns:
        The model to call and the optimizer to step.

    Raises:
        ConfigError: the strategy is not available here, or the ranks' models, optimizers or settings differ.
    """
    config = config or TrainerConfig()
    joined = join(strategy, config)
    return wrap(joined, model, optimizer, config)


def join(strategy: str | Strategy, config: TrainerConfig) -> Strategy:
    """Join the job that this process was launched into; print on rank 0 what was tuned. Collective."""
    report_failures()
    if isinstance(strategy, Strategy):
        return strategy
    world = _with_usable_device(strategy, current_world(config.device), config)
    if world.device.type == "cuda":
        # Plain "cuda" in user code then means this rank's GPU, not the first one on every rank.
        torch.cuda.set_device(world.device)
    joined = make_strategy(strategy, world)
    hosts = joined.all_gather_object((world.host, machine_id()))
    tuning = dict(joined.tuning) | share_machine(world, [one for _, one in hosts])
    if joined.world.is_root:
        tuned = "; ".join(f"{name} {choice}" for name, choice in tuning.items())
        ranks = f"{world.size} ranks on {_per_host(hosts)}; " if world.size > 1 else ""
        line = f"{ranks}{joined.description}{'; tuned: ' + tuned if tuned else ''}"
        print(f"trainer: {line}", file=sys.stderr, flush=True)
    return joined


def _per_host(hosts: list[tuple[str, str]]) -> str:
    """Format the ranks per host, as in "a: 2, b: 2", in the order of the ranks."""
    return ", ".join(f"{host}: {ranks}" for host, ranks in Counter(host for host, _ in hosts).items())


def _with_usable_device(strategy: str, world: World, config: TrainerConfig) -> World:
    """Return the world on the CPU where device "auto" has found GPUs that these ranks cannot use; warn on rank 0."""
    gpus = torch.cuda.device_count()
    if config.device != "auto" or gpus == 0:
        return world
    reason = None
    if world.device.type == "cpu":
        reason = f"this host has {gpus} GPU{'s' * (gpus > 1)} for {world.local_size} ranks"
    elif choose_strategy(strategy, world) == "horovod" and not has_nccl():
        reason = (
            "this Horovod was built without NCCL (rebuild it with nvcc on the PATH: "
            "`python scripts/install/build_horovod.py --gpu nccl`)"
        )
    if reason is None:
        return world
    if world.is_root:
        print(f"trainer: WARNING: training on the CPU, because {reason}", file=sys.stderr, flush=True)
    return replace(world, device=torch.device("cpu"))


def wrap(
    strategy: Strategy, model: nn.Module, optimizer: Optimizer, config: TrainerConfig
) -> tuple[nn.Module, Optimizer]:
    """Run the consistency checks, then let the strategy prepare the model. Collective."""
    _check_parameters(model, optimizer)
    check_devices(strategy)
    check_consistency(
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
        # Moves state that was loaded from a checkpoint to its parameters' device.
        optimizer.load_state_dict(optimizer.state_dict())
    if config.sync_batch_norm:
        convert_sync_batch_norm(model, strategy.all_reduce)
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
            f"the optimizer holds {strangers} parameters that the model does not have; their gradients would "
            "not be all-reduced: make them part of the model"
        )


def _settings(config: TrainerConfig) -> dict[str, object]:
    # These two may differ between ranks.
    private = ("log_every_s", "workers")
    return {f"setting {name}": value for name, value in config.as_dict().items() if name not in private}

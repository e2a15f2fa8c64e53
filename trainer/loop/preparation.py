"""Preparation: joins the job, and prepares models and optimizers for training across its ranks."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import TIMEOUT_MAX, Timer
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainer.cluster.forks import wait_for_threads_before_forks
from trainer.cluster.gpus import SHARING_HINT, describe_sharing, gpu_id, sharing_is_on
from trainer.cluster.nccl_log import NcclLog, describe_transports, read_transports
from trainer.cluster.network import machine_id
from trainer.cluster.output import print_line, write_whole_lines
from trainer.cluster.world import World, current_world
from trainer.config import FsdpConfig, RunConfig
from trainer.errors import ConfigError
from trainer.loop.consistency import (
    check_consistency,
    check_devices,
    describe_model,
    describe_optimizer,
    describe_settings,
)
from trainer.models.sync_batch_norm import convert_sync_batch_norm
from trainer.strategies import choose_strategy, has_nccl, make_strategy
from trainer.strategies.base import Strategy, Synchronizer
from trainer.strategies.compress.communication import make_synchronizer
from trainer.tuning.host import share_machine
from trainer.watch import start as hang
from trainer.watch.failure import end_process, report_failures
from trainer.watch.heartbeat import LOST_PEER, report_failure, report_join, report_phase

_UNCONNECTED_S = 20.0
"""After this long without a connection between the ranks, rank 0 says that it waits."""
_UNCONNECTED = (
    "the ranks have not connected so far: one of them has not come to trainer.init, or a host cannot reach another; "
    "`trainer doctor`, with -H as the job has it, says why"
)
_UNCONNECTED_BY_NCCL = (
    "NCCL has not connected the ranks so far; `trainer doctor --gpu`, with -H as the job has it, says why"
)

StepHook = Callable[[Optimizer, Any, Any], Any]

# A model or an optimizer that is prepared again, by another Run or Trainer, leaves the first one.
_PREPARED: MutableMapping[nn.Module, weakref.WeakMethod[Callable[[], None]]] = WeakKeyDictionary()
_HOOKS: MutableMapping[Optimizer, Sequence[RemovableHandle]] = WeakKeyDictionary()


def join(strategy: str | Strategy, config: RunConfig) -> Strategy:
    """Join the job that this process was launched into; print on rank 0 what was tuned. Collective."""
    report_failures()
    wait_for_threads_before_forks()
    if isinstance(strategy, Strategy):
        return strategy
    world = current_world(config.device)
    if world.size > 1:
        write_whole_lines()
    report_join(world.rank)
    world = _with_usable_device(strategy, world, config)
    if world.device.type == "cuda":
        # Plain "cuda" in user code then means this rank's GPU, not the first one on every rank.
        torch.cuda.set_device(world.device)
    log = NcclLog() if world.size > 1 and world.device.type == "cuda" else None  # before NCCL's first call
    with _said_until_connected(world, _UNCONNECTED, hang.connection_limit_s(config.hang_timeout_s)):
        joined = make_strategy(strategy, world)
        own = (world.host, machine_id(), gpu_id(world.device), joined.is_over_nccl, hang.describe(world))
        hosts, machines, gpus, over_nccl, watched = zip(*joined.all_gather_object(own), strict=True)
    hang.start(joined.world, watched, config.hang_timeout_s, joined.broadcast_object, joined.flight_recorder)
    if log is not None:
        joined.description += _connect(joined, log) if all(over_nccl) else ""
        log.close()
    if sharing_is_on() and (shared := describe_sharing(gpus)):
        joined.description += f"; {shared}"
    tuning = dict(joined.tuning) | share_machine(world, machines)
    if joined.world.is_root:
        tuned = "; ".join(f"{name} {choice}" for name, choice in tuning.items())
        ranks = f"{world.size} ranks on {_per_host(hosts)}; " if world.size > 1 else ""
        line = f"{ranks}{joined.description}{'; tuned: ' + tuned if tuned else ''}"
        print_line(f"trainer: {line}", sys.stderr)
    report_phase("joined")
    return joined


def _connect(strategy: Strategy, log: NcclLog) -> str:
    """Connect the ranks over NCCL; return how they are connected, for the first line of output. Collective.

    They would be connected by the first exchange of weights, so that it takes no time of the run. Only then it is known
    whether GPUDirect RDMA is used, which is why the line comes after it.
    """
    check_devices(strategy)
    with _said_until_connected(strategy.world, _UNCONNECTED_BY_NCCL):
        strategy.all_reduce(torch.ones(1, device=strategy.world.device)).item()  # waits for the device
    found = strategy.all_gather_object(read_transports(log.read()))
    transports = describe_transports(set().union(*found))
    return f"; NCCL: {transports}" if transports else ""


@contextmanager
def _said_until_connected(world: World, text: str, end_s: float = 0.0) -> Iterator[None]:
    """Print on rank 0 what it waits for when that takes long; end it after `end_s` seconds, and with it the job.

    No watch runs yet, and MPI waits for ever where a firewall is between two hosts.
    """
    timers = []
    if world.is_root and world.size > 1:
        timers.append(Timer(_UNCONNECTED_S, print_line, (f"trainer: {text}", sys.stderr)))
        if end_s:
            timers.append(Timer(min(end_s, TIMEOUT_MAX), _give_up, (world, f"given up after {end_s:.0f} s: {text}")))
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def _give_up(world: World, message: str) -> None:
    report_failure(LOST_PEER, message, world.rank)
    end_process(message, 1)


def _per_host(hosts: Iterable[str]) -> str:
    """Format the ranks per host, as in "a: 2, b: 2", in the order of the ranks."""
    return ", ".join(f"{host}: {ranks}" for host, ranks in Counter(hosts).items())


def _with_usable_device(strategy: str, world: World, config: RunConfig) -> World:
    """Return the world on the CPU where device "auto" has found GPUs that these ranks cannot use; warn on rank 0."""
    gpus = torch.cuda.device_count()
    if config.device != "auto" or gpus == 0:
        return world
    reason = None
    if world.device.type == "cpu":
        reason = f"this host has {gpus} GPU{'s' * (gpus > 1)} for {world.local_size} ranks; {SHARING_HINT}"
    elif choose_strategy(strategy, world) == "horovod" and not has_nccl():
        reason = (
            "this Horovod was built without NCCL (rebuild it with nvcc on the PATH: "
            "`python scripts/install/build_horovod.py --gpu nccl`)"
        )
    if reason is None:
        return world
    if world.is_root:
        print_line(f"trainer: WARNING: training on the CPU, because {reason}", sys.stderr)
    return replace(world, device=torch.device("cpu"))


def prepare_model(strategy: Strategy, model: nn.Module, config: RunConfig) -> Synchronizer:
    """Run the consistency checks, then move the model and have the strategy synchronize its gradients. Collective.

    Raises:
        ConfigError: ranks disagree about the model or a setting.
    """
    if config.fsdp != FsdpConfig() and not strategy.shards:
        raise ConfigError("fsdp is given, and the strategy is another one; take strategy 'fsdp', or leave fsdp out")
    check_devices(strategy)
    check_consistency(
        strategy,
        {
            **describe_model(model),
            "PyTorch's version": torch.__version__,
            "the kind of device": strategy.world.device.type,
            **describe_settings(config),
        },
    )
    earlier = _PREPARED.pop(model, None)
    if earlier is not None and (retire := earlier()) is not None:
        retire()
    if not strategy.shards:
        model.to(strategy.world.device)
    if config.sync_batch_norm:
        convert_sync_batch_norm(model, strategy.sum_statistics)
    if config.compile and not strategy.shards:
        model.compile()
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    synchronizer = strategy.follow_model(model, make_synchronizer(strategy, model, named, config), config)
    _PREPARED[model] = weakref.WeakMethod(synchronizer.retire)
    return synchronizer


def check_parameters(strategy: Strategy, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Check that every parameter of the optimizers is one of exactly one model's.

    Args:
        models: in an order that is the same on every rank.

    Raises:
        ConfigError: an optimizer has a parameter that belongs to none of the models, or two models share one.
    """
    owners: dict[int, nn.Module] = {}
    for model in models:
        for parameter in model.parameters():
            if owners.setdefault(id(parameter), model) is not model:
                raise ConfigError(
                    f"{type(model).__name__} and {type(owners[id(parameter)]).__name__} share parameters, and each "
                    "gradient is all-reduced once; prepare one model that contains both"
                )
    for optimizer in optimizers:
        held = {id(strategy.current(one)) for group in optimizer.param_groups for one in group["params"]}
        strangers = len(held - set(owners))
        if strangers:
            raise ConfigError(
                f"the optimizer holds {strangers} parameters that the model does not have; their gradients would "
                "not be all-reduced: make them part of a model, and prepare it first or in the same call; loose ones, "
                "as learnable weights of losses are, go into an nn.ParameterList, which is a model"
            )


def parameters_of(optimizer: Optimizer) -> set[int]:
    """Return the ids of the optimizer's parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def prepare_optimizer(strategy: Strategy, optimizer: Optimizer, before_step: StepHook, after_step: StepHook) -> None:
    """Give the optimizer rank 0's state and the hooks of its steps, which replace an earlier call's. Collective.

    Raises:
        ConfigError: ranks disagree about the optimizer.
    """
    check_consistency(strategy, describe_optimizer(optimizer))
    if optimizer.state:
        # Moves state that was loaded from a checkpoint to its parameters' device.
        optimizer.load_state_dict(optimizer.state_dict())
    strategy.adopt(optimizer)
    for hook in _HOOKS.pop(optimizer, ()):
        hook.remove()
    _HOOKS[optimizer] = (optimizer.register_step_pre_hook(before_step), optimizer.register_step_post_hook(after_step))

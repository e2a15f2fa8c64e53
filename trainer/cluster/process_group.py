"""torch.distributed's default process group, under every launcher.

Libraries ask it, or RANK and WORLD_SIZE, whether they are alone: metrics, samplers, datasets. So every job has it,
whatever sums its gradients.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainer.cluster.environment import set_default
from trainer.cluster.launchers import LAUNCHERS
from trainer.cluster.network import address_toward_master, choose_gloo_interface, gloo_on_loopback
from trainer.cluster.output import warn
from trainer.cluster.rendezvous import init_process_group
from trainer.cluster.world import World
from trainer.errors import ConfigError

_TIMEOUT = timedelta(minutes=30)
"""Of a collective: torch's own for Gloo. The watch for hangs ends a job earlier."""
_GLOO_SHUTDOWN_S = 0.05


def join_group(world: World) -> tuple[dist.ProcessGroup | None, Callable[[], None]]:
    """Make the default process group, unless the script has made it; set RANK and the like where nobody has.

    On GPUs it has Gloo as well as NCCL, which makes its communicator when something first uses it. Collective.

    Returns:
        The group for host memory where the default group takes only GPUs' tensors, else None; a function that leaves
        the group, unless it is the script's.

    Raises:
        ConfigError: the launcher provides no rendezvous, or the script's group has other ranks than the job.
    """
    _set_ranks(world)
    if dist.is_initialized():  # by an earlier run in this process, or by the script, which then also ends it
        _check_ranks(world)
        if "cpu" in dist.get_backend_config():
            return None, lambda: None
        choose_gloo_interface(address_toward_master(is_one_host=world.local_size == world.size))
        host_group: Any = dist.new_group(backend="gloo")
        return host_group, lambda: None
    backend = "gloo"
    if world.device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(world.device)
    if world.size == 1:
        with gloo_on_loopback():
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    elif LAUNCHERS[world.launcher].rendezvous == "store":
        choose_gloo_interface(address_toward_master(is_one_host=world.local_size == world.size))
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=_TIMEOUT)
    else:
        init_process_group(backend, world, timeout=_TIMEOUT)
    return None, _leave


def _leave() -> None:
    if dist.is_initialized():  # else the script has ended it
        dist.destroy_process_group()
    # Gloo's threads release their last tensor a moment later, and need Python for that. Where Python is already
    # shutting down by then, they abort the process (1 run in 6, measured).
    time.sleep(_GLOO_SHUTDOWN_S)


def _set_ranks(world: World) -> None:
    """Set torchrun's variables for this rank. Its addresses stay unset: no store listens at any."""
    if world.size == 1:
        return
    facts = {"RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    if other := [name for name, value in facts.items() if os.environ.get(name, "") not in ("", value)]:
        if world.is_root:
            warn(
                f"{other[0]} is {os.environ[other[0]]}, and {world.launcher} has started this as rank {world.rank} of "
                f"{world.size}: libraries that read it take a wrong part of the data; unset it"
            )
        return
    if world.device.index in (None, world.local_rank):  # else LOCAL_RANK would not be the number of this rank's GPU
        facts |= {"LOCAL_RANK": str(world.local_rank), "LOCAL_WORLD_SIZE": str(world.local_size)}
    for name, value in facts.items():
        set_default(name, value)


def _check_ranks(world: World) -> None:
    theirs = (dist.get_rank(), dist.get_world_size())
    if theirs != (world.rank, world.size):
        raise ConfigError(
            f"torch.distributed's process group was made before trainer.init, and this is rank {theirs[0]} of "
            f"{theirs[1]} there; for {world.launcher} it is rank {world.rank} of {world.size}, which must be the same"
        )

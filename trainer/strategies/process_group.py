"""The base class of strategies over torch.distributed: makes the process group, and has its collectives."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.cluster.network import address_toward_master, choose_gloo_interface, gloo_on_loopback
from trainer.cluster.rendezvous import Rendezvous, init_process_group
from trainer.cluster.world import World
from trainer.strategies.base import Strategy
from trainer.strategies.collectives import in_place
from trainer.tuning import tune
from trainer.watch.failure import at_exit
from trainer.watch.recorder import find_recorder

_TIMEOUT = timedelta(minutes=10)
_GLOO_SHUTDOWN_S = 0.05


class ProcessGroupStrategy(Strategy):
    """Base of strategies over torch.distributed. Launchers other than torchrun carry the rendezvous.

    Raises:
        ConfigError: there are several ranks, and their launcher provides no rendezvous.
    """

    name: str
    """The first word of the description."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.tuning = tune(world)
        backend = "gloo"
        if world.device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"  # objects are sent over Gloo, gradients over NCCL
            torch.cuda.set_device(world.device)
        self.is_over_nccl = world.device.type == "cuda"
        self.flight_recorder = find_recorder(is_over_nccl=self.is_over_nccl)
        transport = "NCCL" if self.is_over_nccl else "Gloo"
        self.description = f"{self.name} over {transport}, {world}"
        self._is_ours = not dist.is_initialized()
        if dist.is_initialized():
            return  # by an earlier trainer in this process, or by the user, who then also ends it
        at_exit(self.close)
        if world.size == 1:
            with gloo_on_loopback():
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        elif all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")):
            choose_gloo_interface(address_toward_master(is_one_host=world.local_size == world.size))
            dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=_TIMEOUT)
        else:  # under any launcher but torchrun
            rendezvous = Rendezvous(world)
            init_process_group(backend, world, rendezvous, timeout=_TIMEOUT)
            rendezvous.close()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return in_place(dist.all_reduce, tensor)

    def start_gradients(self, flat: Tensor, name: str) -> Callable[[], object]:
        wait: Callable[[], object] = dist.all_reduce(flat, async_op=True).wait
        return wait

    def broadcast(self, tensor: Tensor) -> Tensor:
        return in_place(partial(dist.broadcast, src=0), tensor)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=root)
        return box[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.world.size
        dist.all_gather_object(gathered, value)
        return gathered

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        if self._is_ours and dist.is_initialized():
            dist.destroy_process_group()
            # Gloo's threads release their last tensor a moment later, and need Python for that. Where Python is
            # already shutting down by then, they abort the process (1 run in 6, measured).
            time.sleep(_GLOO_SHUTDOWN_S)

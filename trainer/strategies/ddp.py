"""Gradient synchronization by torch's DistributedDataParallel, over NCCL between GPUs and Gloo between CPUs."""

from __future__ import annotations

import atexit
import os
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.launch.rendezvous import Rendezvous, init_process_group
from trainer.launch.world import World
from trainer.strategies.base import Strategy, broadcast_optimizer_state
from trainer.tuning import tune

_TIMEOUT = timedelta(minutes=10)
_GLOO_SHUTDOWN_S = 0.05


class DDPStrategy(Strategy):
    """torch.distributed, usually under torchrun; under other launchers with a rendezvous over their own channel.

    Raises:
        ConfigError: there are several ranks, and their launcher provides no rendezvous.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.tuning = tune(world)
        backend = "gloo"
        if world.device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"  # objects are sent over Gloo, gradients over NCCL
            torch.cuda.set_device(world.device)
        transport = "NCCL" if world.device.type == "cuda" else "Gloo"
        self.description = f"DistributedDataParallel over {transport}, {world}"
        self._wrapped: DistributedDataParallel | None = None
        self._seconds_before = 0.0
        if dist.is_initialized():
            return  # by an earlier trainer in this process, or by the user, who then also ends it
        atexit.register(self.close)
        if world.size == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        elif all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")):
            dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=_TIMEOUT)
        else:  # under any launcher but torchrun
            rendezvous = Rendezvous(world)
            init_process_group(backend, world, rendezvous, timeout=_TIMEOUT)
            rendezvous.close()

    def prepare(self, model: nn.Module, optimizer: Optimizer, config: TrainerConfig) -> tuple[nn.Module, Optimizer]:
        if config.reduction == "adasum":
            raise ConfigError("reduction is 'adasum', which strategy 'ddp' does not have; valid there is average")
        # Buffers are broadcast before an evaluation, not in every forward pass.
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.world.device] if self.world.device.type == "cuda" else None,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=config.dynamic_graph,
        )
        if config.compression == "fp16":
            wrapped.register_comm_hook(None, fp16_compress_hook)
        broadcast_optimizer_state(self, optimizer)
        self._wrapped = wrapped
        return wrapped, optimizer

    def all_reduce(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=0)
        return tensor

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

    def exchange_seconds(self) -> float | None:
        # DDP times every hundredth iteration unless it is told to time each; its mean is over those it has timed.
        if self._wrapped is None:
            return None
        self._wrapped._set_ddp_runtime_logging_sample_rate(1)
        seen = self._wrapped._get_ddp_logging_data()
        seconds = float(seen.get("avg_backward_comm_time") or 0) / 1e9 * float(seen.get("iteration") or 0)
        since, self._seconds_before = seconds - self._seconds_before, seconds
        return since

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
            # Gloo's threads release their last tensor a moment later, and need Python for that. Where Python is
            # already shutting down by then, they abort the process (1 run in 6, measured).
            time.sleep(_GLOO_SHUTDOWN_S)

    def no_sync(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[None]:
        no_sync: AbstractContextManager[None] = model.no_sync()  # type: ignore[operator]
        return no_sync

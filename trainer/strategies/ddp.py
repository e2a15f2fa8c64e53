"""Gradient synchronization in buckets by torch.distributed, over NCCL between GPUs and Gloo between CPUs.

It sends what PyTorch's DistributedDataParallel sends, and overlaps it with the backward pass as that does (Li et al.,
"PyTorch Distributed", VLDB 2020). It does not wrap the model: what a forward pass returns, how many backward passes
follow it, and which rank runs it is the script's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn

from trainer.cluster.world import World
from trainer.config import RunConfig
from trainer.errors import ConfigError
from trainer.strategies.base import NamedParameters, Synchronizer
from trainer.strategies.buckets import BucketSynchronizer, buckets_for
from trainer.strategies.process_group import ProcessGroupStrategy


class DDPStrategy(ProcessGroupStrategy):
    """Data parallelism over torch.distributed."""

    name = "DDP"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._seconds: float | None = None
        self._sending = 0
        self._sent_at = 0.0

    def prepare(self, model: nn.Module, parameters: NamedParameters, config: RunConfig) -> Synchronizer:
        if config.reduction == "adasum":
            raise ConfigError("reduction is 'adasum', which strategy 'ddp' does not have; valid there is average")
        self.broadcast_tensors(tensor.data for tensor in (*model.parameters(), *model.buffers()))
        if not parameters or self.world.size == 1:
            return Synchronizer()
        self._seconds = self._seconds or 0.0
        buckets = buckets_for(parameters, config, self.world.device)
        return BucketSynchronizer(parameters, buckets, self._start, self.world.size)

    def exchange_seconds(self) -> float | None:
        """Return the seconds between the first message of a backward pass and the end of the last one, all added up."""
        seconds, self._seconds = self._seconds, None if self._seconds is None else 0.0
        return seconds

    def _start(self, flat: Tensor) -> Callable[[], object]:
        if self._sending == 0:
            self._sent_at = time.perf_counter()
        self._sending += 1
        work = dist.all_reduce(flat, async_op=True)

        def wait() -> None:
            work.wait()
            self._sending -= 1
            if self._sending == 0:
                self._seconds = (self._seconds or 0.0) + time.perf_counter() - self._sent_at

        return wait

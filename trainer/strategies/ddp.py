"""Gradient synchronization in buckets by torch.distributed, over NCCL between GPUs and Gloo between CPUs.

It sends what PyTorch's DistributedDataParallel sends, and overlaps it with the backward pass in the same way (Li
et al., "PyTorch Distributed", VLDB 2020). It does not wrap the model, so a script is free in what a forward pass
returns, how many backward passes follow it, and which ranks run it.
"""

from __future__ import annotations

from typing import ClassVar

import torch.distributed as dist

from trainer.cluster.world import World
from trainer.errors import ConfigError
from trainer.strategies.base import Strategy
from trainer.tuning import tune
from trainer.watch.recorder import find_recorder


class DDPStrategy(Strategy):
    """Data parallelism over torch.distributed, in the buckets that every strategy sends by default."""

    name: ClassVar = "DDP"
    """The first word of the description."""
    over_host_memory = False

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.tuning = tune(world)
        is_over_nccl = world.device.type == "cuda"
        self.flight_recorder = find_recorder(is_over_nccl=is_over_nccl)
        self.description = f"{self.name} over {'NCCL' if is_over_nccl else 'Gloo'}, {world}"

    def connect(self) -> None:
        super().connect()
        if self.world.device.type == "cuda" and "cuda:nccl" not in dist.get_backend_config():
            raise ConfigError(
                f"torch.distributed's process group was made before trainer.init as {dist.get_backend_config()}, and "
                f"strategy {self.name} exchanges over NCCL; make it as 'cpu:gloo,cuda:nccl', or leave it to init"
            )

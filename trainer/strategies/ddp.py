"""Gradient synchronization in buckets by torch.distributed, over NCCL between GPUs and Gloo between CPUs.

It sends what PyTorch's DistributedDataParallel sends, and overlaps it with the backward pass as that does (Li et al.,
"PyTorch Distributed", VLDB 2020). It does not wrap the model: what a forward pass returns, how many backward passes
follow it, and which rank runs it is the script's.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from trainer.config import RunConfig
from trainer.errors import ConfigError
from trainer.strategies.base import NamedParameters, Synchronizer
from trainer.strategies.buckets import BucketSynchronizer, buckets_for
from trainer.strategies.process_group import ProcessGroupStrategy


class DDPStrategy(ProcessGroupStrategy):
    """Data parallelism over torch.distributed."""

    name = "DDP"

    def prepare(self, model: nn.Module, parameters: NamedParameters, config: RunConfig) -> Synchronizer:
        if config.reduction == "adasum":
            raise ConfigError("reduction is 'adasum', which strategy 'ddp' does not have; valid there is average")
        self.broadcast_tensors(tensor.data for tensor in (*model.parameters(), *model.buffers()))
        if not parameters or self.world.size == 1:
            return Synchronizer()
        buckets = buckets_for(parameters, config, self.world.device)
        return BucketSynchronizer(parameters, buckets, partial(self.start_gradients, name="bucket"), self.world.size)

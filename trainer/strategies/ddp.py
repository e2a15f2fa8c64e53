"""Gradient synchronization in buckets by torch.distributed, over NCCL between GPUs and Gloo between CPUs.

It sends what PyTorch's DistributedDataParallel sends, and overlaps it with the backward pass as that does (Li et al.,
"PyTorch Distributed", VLDB 2020). It does not wrap the model: what a forward pass returns, how many backward passes
follow it, and which rank runs it is the script's.
"""

from __future__ import annotations

from trainer.strategies.process_group import ProcessGroupStrategy


class DDPStrategy(ProcessGroupStrategy):
    """Data parallelism over torch.distributed, in the buckets that every strategy sends by default."""

    name = "DDP"

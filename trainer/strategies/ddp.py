"""Gradient synchronization in buckets by torch.distributed, over NCCL between GPUs and Gloo between CPUs.

It sends what PyTorch's DistributedDataParallel sends, and overlaps it with the backward pass in the same way (Li
et al., "PyTorch Distributed", VLDB 2020). It does not wrap the model, so a script is free in what a forward pass
returns, how many backward passes follow it, and which ranks run it.
"""

from __future__ import annotations

from trainer.strategies.process_group import ProcessGroupStrategy


class DDPStrategy(ProcessGroupStrategy):
    """Data parallelism over torch.distributed, in the buckets that every strategy sends by default."""

    name = "DDP"

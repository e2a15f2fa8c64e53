"""torch's DataParallel, one process with several GPUs, for comparison. All other strategies are faster."""

from __future__ import annotations

import torch
from torch import nn

from trainer.cluster.world import World
from trainer.config import RunConfig
from trainer.errors import ConfigError
from trainer.strategies.single import SingleStrategy


class DataParallelStrategy(SingleStrategy):
    """A world of one rank that divides each of its batches among the GPUs of this host.

    Every step copies the model to all GPUs, and all gradients to the first one. PyTorch's own documentation advises
    against it: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html

    Raises:
        ConfigError: there are fewer than two GPUs, or the process is one of several.
    """

    def __init__(self, world: World) -> None:
        if world.size != 1:
            raise ConfigError(
                f"strategy 'data_parallel' is one process with several GPUs, but {world.launcher} started {world.size} "
                "ranks; start it with plain python"
            )
        self._gpus = torch.cuda.device_count()
        if self._gpus < 2 or world.device.type != "cuda":
            raise ConfigError(
                f"strategy 'data_parallel' needs two GPUs or more in one host, and device 'cuda' or 'auto'; this one "
                f"shows {self._gpus}, and the device is {world.device}; on CPUs, start several processes instead "
                "(horovodrun -np 2, torchrun)"
            )
        super().__init__(world)
        self.description = f"DataParallel over {self._gpus} GPUs, {world}"

    def check(self, config: RunConfig) -> None:
        if config.sync_batch_norm:
            raise ConfigError(
                "sync_batch_norm is True, and strategy 'data_parallel' is one rank, each of whose GPUs normalizes its "
                "own part of a batch; start one rank for each GPU instead (horovodrun -np 2, torchrun)"
            )

    def wrap(self, model: nn.Module) -> nn.Module:
        return nn.DataParallel(model)

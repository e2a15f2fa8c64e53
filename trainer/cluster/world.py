"""World: the processes that train together, and this process's rank among them."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

import torch

from trainer.cluster.environment import Launch, read_launch
from trainer.cluster.gpus import SHARING_HINT, check_sharing, sharing_is_on
from trainer.cluster.launchers import LAUNCHERS
from trainer.config import DEVICES
from trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class World(Launch):
    """Ranks and devices of a job. A single process is a world of size 1, so callers need no special case.

    Raises:
        ConfigError: a rank does not fit its size.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where this rank computes."""
    host: str = field(default_factory=socket.gethostname)

    def __post_init__(self) -> None:
        for name, rank, size in (("rank", self.rank, self.size), ("local rank", self.local_rank, self.local_size)):
            if not 0 <= rank < size:
                raise ConfigError(f"{name} is {rank}; with {size} processes it must be 0 to {size - 1}")

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} on {self.host} ({self.device})"


def current_world(device: str = "auto", launch: Launch | None = None) -> World:
    """Return the world that this process was launched into. Starts nothing.

    Args:
        device: "auto", "cpu" or "cuda"; auto takes the GPU numbered like the local rank, or the CPU where this
            host has fewer GPUs than ranks. With NCCL_MULTI_RANK_GPU_ENABLE=1, ranks share the GPUs instead.
        launch: read from the environment when None.

    Raises:
        ConfigError: a GPU was asked for and there is none for this rank, or ranks shall share one and cannot.
    """
    launch = launch or read_launch()
    return World(**vars(launch), device=_choose_device(device, launch))


def _choose_device(device: str, launch: Launch) -> torch.device:
    if device not in DEVICES:
        raise ConfigError(f"device is {device!r}; valid are {', '.join(DEVICES)}")
    gpus = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus == 0:
        raise ConfigError("device is 'cuda', but this host shows no GPU; valid here is cpu")
    if gpus < launch.local_size and sharing_is_on():
        check_sharing(gpus, launch.local_size)
        return torch.device("cuda", launch.local_rank % gpus)
    if device == "auto" and gpus < launch.local_size and not (gpus == 1 and LAUNCHERS[launch.launcher].is_scheduler):
        return torch.device("cpu")  # for all ranks of this host, not only for those that would have none
    # Slurm can show each rank its own GPU only, which is then number 0 for all of them. Ranks that really share
    # a GPU are found by the consistency check before the first step.
    index = 0 if gpus == 1 else launch.local_rank
    if index >= gpus:
        raise ConfigError(
            f"local rank {launch.local_rank} has no GPU: this host shows {gpus}, "
            f"so it takes at most {gpus} ranks (or --device cpu); {SHARING_HINT}"
        )
    return torch.device("cuda", index)

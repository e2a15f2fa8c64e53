"""Transports of an all-reduce behind one interface, for comm_bench.py.

Each transport is opened, measured and closed before the next one, so that no idle thread of another transport uses a
core. torch.distributed's process group, over which comm_bench.py exchanges its results, stays: its threads sleep.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from examples.strategies import STRATEGIES
from trainer.cluster.mpi import import_mpi
from trainer.cluster.world import World
from trainer.errors import ConfigError
from trainer.strategies import make_strategy
from trainer.tuning import tune


class Transport(ABC):
    """A transport that sums float32 values over all ranks.

    Raises:
        ConfigError: it is not available here.
    """

    device = torch.device("cpu")
    bytes_sent: int | None = None
    """Sent by this rank so far; None where the transport does not count."""

    def __init__(self, world: World) -> None:  # noqa: B027 (nothing to open is a valid default)
        """Open the transport. Collective."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over all ranks in place. On a GPU this only enqueues the all-reduce."""

    def wait(self) -> None:
        """Wait until all operations are done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:  # noqa: B027 (nothing to close is a valid default)
        """Close the transport. Collective."""

    def abandon(self) -> None:  # noqa: B027
        """Close a transport that another rank could not open. Not collective."""


class Horovod(Transport):
    """Horovod, over NCCL, MPI or Gloo."""

    def __init__(self, world: World) -> None:
        tune(world, horovod=True)
        import horovod.torch as hvd

        self._hvd = hvd
        if world.launcher == "torchrun":
            raise ConfigError("Horovod cannot join ranks that torchrun started")
        if world.device.type == "cuda":
            if not hvd.nccl_built():
                raise ConfigError("this Horovod was built without NCCL")
            self.device = world.device
        self._is_ours = not hvd.is_initialized()
        hvd.init()
        over = "NCCL" if self.device.type == "cuda" else "MPI" if hvd.mpi_enabled() else "Gloo"
        self.name = f"Horovod over {over}"

    def all_reduce(self, tensor: Tensor) -> None:
        self._hvd.allreduce_(tensor, op=self._hvd.Sum, name="bench")

    def close(self) -> None:
        if self._is_ours:
            self._hvd.shutdown()


class RawMPI(Transport):
    """MPI through mpi4py."""

    name = "MPI"

    def __init__(self, world: World) -> None:
        tune(world)
        self._mpi = import_mpi(world, for_what="this transport")
        self._comm = self._mpi.COMM_WORLD

    def all_reduce(self, tensor: Tensor) -> None:
        self._comm.Allreduce(self._mpi.IN_PLACE, tensor.numpy())


class RawGloo(Transport):
    """Gloo through torch.distributed's default process group."""

    name = "Gloo"

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)


class RawNCCL(RawGloo):
    """NCCL through torch.distributed's default process group."""

    name = "NCCL"

    def __init__(self, world: World) -> None:
        if world.device.type != "cuda":
            raise ConfigError("NCCL needs a GPU for every rank")
        self.device = world.device


class StrategyTransport(Transport):
    """All-reduce of one of the strategies of examples/strategies."""

    key: str

    def __init__(self, world: World) -> None:
        self._strategy: Any = make_strategy(STRATEGIES[self.key], world)
        self._strategy.connect()

    def all_reduce(self, tensor: Tensor) -> None:
        self._strategy.sum_gradients(tensor)

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        return int(self._strategy.bytes_sent)

    def close(self) -> None:
        self._strategy.barrier()
        self.abandon()

    def abandon(self) -> None:
        self._strategy.close()


class OurRing(StrategyTransport):
    """Ring all-reduce."""

    name, key = "ring (trainer)", "ring"


class OurParameterServer(StrategyTransport):
    """Parameter server."""

    name, key = "parameter server (trainer)", "parameter_server"


# Horovod comes last: after its shutdown no other user of MPI may start.
TRANSPORTS: dict[str, Callable[[World], Any]] = {
    "mpi": RawMPI,
    "ring": OurRing,
    "gloo": RawGloo,
    "nccl": RawNCCL,
    "parameter_server": OurParameterServer,
    "horovod": Horovod,
}

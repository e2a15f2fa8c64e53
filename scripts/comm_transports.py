"""The ways in which an all-reduce can be done here, behind one small interface; for comm_bench.py.

Each is joined, measured and left before the next one, so that no idle thread of another takes the core.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer import tuning
from trainer.errors import ConfigError
from trainer.meeting import Meeting, start_process_group
from trainer.strategies import make_strategy
from trainer.strategies.base import Strategy
from trainer.world import World


class Transport(ABC):
    """One way of summing float32 values over all ranks.

    Raises:
        ConfigError: it cannot be had here; the text says why.
    """

    device = torch.device("cpu")
    bytes_sent: int | None = None
    """By this rank so far, where the transport counts them."""

    @abstractmethod
    def in_place(self, tensor: Tensor) -> None:
        """Sums `tensor` over all ranks; it holds the sum when this returns, or on a GPU once the device gets there."""

    @abstractmethod
    def out_of_place(self, tensor: Tensor, result: Tensor) -> None:
        """Puts the sum of all ranks' `tensor` into `result`."""

    def wait(self) -> None:
        """Returns when what was started is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:  # noqa: B027 (nothing to leave is a valid default)
        """Leaves; collective."""

    def abandon(self) -> None:  # noqa: B027
        """Leaves what another rank could not join; not collective."""


class Horovod(Transport):
    def __init__(self, world: World, meeting: Meeting) -> None:
        tuning.tune_horovod(world)
        import horovod.torch as hvd

        self._hvd = hvd
        if world.launcher == "torchrun":
            raise ConfigError("Horovod cannot join ranks that torchrun started")
        if world.device.type == "cuda":
            if not hvd.nccl_built():
                raise ConfigError("this Horovod was built without NCCL")
            self.device = world.device
        self._is_ours = not hvd.is_initialized()  # else the ranks meet over it, too
        hvd.init()
        over = "NCCL" if self.device.type == "cuda" else "MPI" if hvd.mpi_enabled() else "Gloo"
        self.name = f"Horovod over {over}"

    def in_place(self, tensor: Tensor) -> None:
        self._hvd.allreduce_(tensor, op=self._hvd.Sum, name="bench")

    def out_of_place(self, tensor: Tensor, result: Tensor) -> None:
        result.copy_(self._hvd.allreduce(tensor, op=self._hvd.Sum, name="bench"))

    def close(self) -> None:
        if self._is_ours:
            self._hvd.shutdown()


class RawMPI(Transport):
    name = "MPI"

    def __init__(self, world: World, meeting: Meeting) -> None:
        self._mpi = _mpi(world)
        self._comm = self._mpi.COMM_WORLD

    def in_place(self, tensor: Tensor) -> None:
        self._comm.Allreduce(self._mpi.IN_PLACE, tensor.numpy())

    def out_of_place(self, tensor: Tensor, result: Tensor) -> None:
        self._comm.Allreduce(tensor.numpy(), result.numpy())


class TorchDistributed(Transport):
    """torch.distributed's all-reduce, which knows in-place only: out of place, a copy comes before it."""

    backend: str

    def __init__(self, world: World, meeting: Meeting) -> None:
        import torch.distributed as dist

        self._dist = dist
        start_process_group(self.backend, world, meeting)

    def in_place(self, tensor: Tensor) -> None:
        self._dist.all_reduce(tensor)

    def out_of_place(self, tensor: Tensor, result: Tensor) -> None:
        self._dist.all_reduce(result.copy_(tensor))

    def close(self) -> None:
        self._dist.barrier()
        self.abandon()

    def abandon(self) -> None:
        self._dist.destroy_process_group()


class RawGloo(TorchDistributed):
    name, backend = "Gloo", "gloo"


class RawNCCL(TorchDistributed):
    name, backend = "NCCL", "nccl"

    def __init__(self, world: World, meeting: Meeting) -> None:
        if world.device.type != "cuda":
            raise ConfigError("NCCL needs a GPU for every rank")
        self.device = world.device
        torch.cuda.set_device(world.device)
        super().__init__(world, meeting)


class OfOurs(Transport):
    """A strategy's own all-reduce. Out of place, a copy comes before it."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy: Any = strategy

    def in_place(self, tensor: Tensor) -> None:
        self._strategy.sum_gradients(tensor)

    def out_of_place(self, tensor: Tensor, result: Tensor) -> None:
        self._strategy.sum_gradients(result.copy_(tensor))

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        return int(self._strategy.bytes_sent)

    def close(self) -> None:
        self._strategy.barrier()
        self.abandon()

    def abandon(self) -> None:
        self._strategy.close()


class OurRing(OfOurs):
    name = "ring (trainer)"

    def __init__(self, world: World, meeting: Meeting) -> None:
        _mpi(world)
        super().__init__(make_strategy("ring", world))


class OurParameterServer(OfOurs):
    name = "parameter server (trainer)"

    def __init__(self, world: World, meeting: Meeting) -> None:
        super().__init__(make_strategy("parameter_server", world))


# Horovod last: once it has shut down, nothing else of MPI's should start.
TRANSPORTS: dict[str, Callable[[World, Meeting], Any]] = {
    "mpi": RawMPI,
    "ring": OurRing,
    "gloo": RawGloo,
    "nccl": RawNCCL,
    "parameter_server": OurParameterServer,
    "horovod": Horovod,
}


def _mpi(world: World) -> Any:
    if world.size > 1 and world.launcher not in ("mpirun", "srun"):
        raise ConfigError("these ranks were not started by MPI (horovodrun --mpi, mpirun, srun --mpi=pmix)")
    tuning.tune_mpi(world)
    from mpi4py import MPI

    return MPI

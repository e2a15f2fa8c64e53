"""Every collective and point-to-point call, with numbers small enough to follow, and each checked.

    horovodrun -np 4 python examples/collectives.py
    torchrun --nproc-per-node 2 examples/collectives.py

Runs on whichever of NCCL, Gloo (both through torch.distributed) and MPI (through mpi4py) is there. Rank r begins with
the vector [10·r, 10·r + 1, …], one element per rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import ConfigError, TrainerError, World, current_world, report_failures
from trainer.cluster.mpi import import_mpi
from trainer.cluster.output import print_line
from trainer.cluster.process_group import join_group
from trainer.tuning import tune


class Calls(Protocol):
    """One library's calls; tensors have one element per rank."""

    def broadcast(self, values: Tensor) -> Tensor: ...
    def reduce(self, values: Tensor) -> Tensor: ...
    def all_reduce(self, values: Tensor) -> Tensor: ...
    def all_gather(self, values: Tensor) -> Tensor: ...
    def reduce_scatter(self, values: Tensor) -> Tensor: ...
    def all_to_all(self, values: Tensor) -> Tensor: ...
    def send_receive(self, values: Tensor) -> Tensor: ...
    def grouped(self, values: Tensor) -> Tensor: ...


class OverTorch:
    """torch.distributed."""

    def __init__(self, world: World) -> None:
        self._dist: Any = dist
        self._rank, self._size = world.rank, world.size

    def broadcast(self, values: Tensor) -> Tensor:
        self._dist.broadcast(values, src=0)
        return values

    def reduce(self, values: Tensor) -> Tensor:
        self._dist.reduce(values, dst=0)
        return values

    def all_reduce(self, values: Tensor) -> Tensor:
        self._dist.all_reduce(values)
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        parts = [torch.empty_like(values) for _ in range(self._size)]
        self._dist.all_gather(parts, values)
        return torch.cat(parts)

    def reduce_scatter(self, values: Tensor) -> Tensor:
        result = values.new_empty(1)
        self._dist.reduce_scatter_single(result, values)
        return result

    def all_to_all(self, values: Tensor) -> Tensor:
        result = torch.empty_like(values)
        self._dist.all_to_all_single(result, values)
        return result

    def send_receive(self, values: Tensor) -> Tensor:
        result = torch.empty_like(values)
        left, right = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        # If all ranks sent first, each would wait for a receiver: even ranks send first, odd ranks receive first.
        first, second = (
            (self._dist.send, self._dist.recv) if self._rank % 2 == 0 else (self._dist.recv, self._dist.send)
        )
        for call in (first, second):
            call(values, right) if call is self._dist.send else call(result, left)
        return result

    def grouped(self, values: Tensor) -> Tensor:
        result = torch.empty_like(values)
        left, right = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        operations = [
            self._dist.P2POp(self._dist.isend, values, right),
            self._dist.P2POp(self._dist.irecv, result, left),
        ]
        for request in self._dist.batch_isend_irecv(operations):
            request.wait()
        return result


class OverMPI:
    """mpi4py, on the memory of the tensors."""

    def __init__(self, world: World) -> None:
        tune(world)
        self._mpi = import_mpi(world, for_what="this part")
        self._comm = self._mpi.COMM_WORLD
        self._rank, self._size = world.rank, world.size

    def broadcast(self, values: Tensor) -> Tensor:
        self._comm.Bcast(values.numpy(), root=0)
        return values

    def reduce(self, values: Tensor) -> Tensor:
        result = values.clone()
        self._comm.Reduce(values.numpy(), result.numpy(), root=0)
        return result

    def all_reduce(self, values: Tensor) -> Tensor:
        self._comm.Allreduce(self._mpi.IN_PLACE, values.numpy())
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        result = values.new_empty(self._size * len(values))
        self._comm.Allgather(values.numpy(), result.numpy())
        return result

    def reduce_scatter(self, values: Tensor) -> Tensor:
        result = values.new_empty(1)
        self._comm.Reduce_scatter_block(values.numpy(), result.numpy())
        return result

    def all_to_all(self, values: Tensor) -> Tensor:
        result = torch.empty_like(values)
        self._comm.Alltoall(values.numpy(), result.numpy())
        return result

    def send_receive(self, values: Tensor) -> Tensor:
        result = torch.empty_like(values)
        left, right = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        self._comm.Sendrecv(values.numpy(), dest=right, recvbuf=result.numpy(), source=left)
        return result

    def grouped(self, values: Tensor) -> Tensor:
        result = torch.empty_like(values)
        left, right = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        self._mpi.Request.Waitall([self._comm.Isend(values.numpy(), right), self._comm.Irecv(result.numpy(), left)])
        return result


# Each call: its meaning, and the result on rank r of n.
MEANINGS: dict[str, tuple[str, Callable[[int, int], Tensor]]] = {
    "broadcast": ("rank 0's values, on every rank", lambda r, n: start(0, n)),
    "reduce": ("the sum of all ranks' values, on rank 0 alone", lambda r, n: total(n)),
    "all_reduce": ("the sum of all ranks' values, on every rank", lambda r, n: total(n)),
    "all_gather": ("all ranks' values one after the other, on every rank", lambda r, n: torch.cat(starts(n))),
    "reduce_scatter": ("element r of the sum, on rank r: the first half of a ring", lambda r, n: total(n)[r : r + 1]),
    "all_to_all": ("element r of every rank's, on rank r: a transpose", lambda r, n: torch.stack(starts(n))[:, r]),
    "send_receive": ("the left neighbour's values: one message from rank to rank", lambda r, n: start((r - 1) % n, n)),
    "grouped": ("the same, sending and receiving at once, so that no rank waits", lambda r, n: start((r - 1) % n, n)),
}


def start(rank: int, size: int) -> Tensor:
    """Return a rank's initial values: float32, shape (size,)."""
    return 10.0 * rank + torch.arange(size, dtype=torch.float32)


def starts(size: int) -> list[Tensor]:
    """Return every rank's initial values."""
    return [start(rank, size) for rank in range(size)]


def total(size: int) -> Tensor:
    """Return the sum over all ranks."""
    return torch.stack(starts(size)).sum(0)


def main() -> int:
    report_failures()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    world = current_world(parser.parse_args().device)
    if world.size < 2:
        raise ConfigError("collectives need two ranks or more; start with horovodrun -np 2, mpirun -np 2 or torchrun")
    _, leave = join_group(world)
    on_gpu = world.device.type == "cuda"
    makers: dict[str, Callable[[], Calls]] = {"MPI": lambda: OverMPI(world)}
    makers["NCCL" if on_gpu else "Gloo"] = lambda: OverTorch(world)
    for name, make in makers.items():
        device = world.device if name == "NCCL" else torch.device("cpu")
        try:
            calls = make()
        except (ConfigError, ImportError, RuntimeError) as error:
            _print_on_root(world, f"{name}: left out: {error}")
            continue
        for call in MEANINGS:
            _show(name, call, calls, device, world)
    leave()
    return 0


def _show(name: str, call: str, calls: Calls, device: torch.device, world: World) -> None:
    """Make one call on every rank, check each rank's result, and print rank 0's."""
    meaning, expected = MEANINGS[call]
    result = getattr(calls, call)(start(world.rank, world.size).to(device)).cpu()
    matters = world.is_root or call != "reduce"
    right = not matters or torch.equal(result, expected(world.rank, world.size))
    answers: list[Any] = [right] * world.size
    dist.all_gather_object(answers, right)
    wrong = [str(rank) for rank, is_right in enumerate(answers) if not is_right]
    if wrong:
        raise TrainerError(f"{call} over {name} gave something else than {meaning} on rank {', '.join(wrong)}")
    shown = " ".join(f"{value:g}" for value in result[:8].tolist())
    _print_on_root(
        world, f"{name} {call}: {meaning}; rank 0 has [{shown}{' …' if len(result) > 8 else ''}], all ranks right"
    )


def _print_on_root(world: World, line: str) -> None:
    if world.is_root:
        print_line(line)


if __name__ == "__main__":
    sys.exit(main())

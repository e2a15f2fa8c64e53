"""Collectives: sums, broadcasts and barriers over all ranks, by torch.distributed's default process group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.cluster.world import World
from trainer.watch.heartbeat import BATCH_NORM, note_waits, waits

_NOTED = ("all_reduce", "broadcast", "broadcast_tensors", "broadcast_object", "all_gather_object", "barrier", "prepare")


class Collectives:
    """Sums, broadcasts and barriers over all ranks. Every rank calls the same methods in the same order.

    A world of one rank needs no process group.
    """

    over_host_memory = True
    """Whether tensors on a GPU are exchanged through host memory, by Gloo.

    PyTorch then makes no communicator of NCCL, whose memory on each GPU, and whose order of messages, would come beside
    those of what exchanges the gradients.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.host_group: dist.ProcessGroup | None = None
        """The group that takes objects and tensors in host memory; None stands for the default group."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        note_waits(cls, _NOTED)

    def start_gradients(self, flat: Tensor, name: str) -> Callable[[], object]:
        """Begin to sum gradients over all ranks, in place; return a function that waits for the sum.

        Other methods may be called meanwhile.

        Args:
            flat: the gradients, one-dimensional and contiguous, on the world's device; not to be changed until then.
            name: the same for each message of its kind and for no other; no two are under way at the same time.
        """
        group = self.host_group if flat.device.type == "cpu" else None
        wait: Callable[[], object] = dist.all_reduce(flat, group=group, async_op=True).wait
        return wait

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks, in place; return it."""
        return self._in_place(dist.all_reduce, tensor)

    def sum_statistics(self, tensor: Tensor) -> Tensor:
        """All-reduce statistics of BatchNorm over the global batch, so that the verdict on a hang can name it."""
        with waits(BATCH_NORM, tensor.numel(), counts=True):
            return self.all_reduce(tensor)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with rank 0's, in place; return it."""
        return self._in_place(_broadcast_bytes, tensor)

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite each of `tensors` with rank 0's, in place."""
        for tensor in tensors:
            self.broadcast(tensor)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return rank `root`'s value on every rank. It is sent pickled, inside the job only."""
        self.agree()
        box = [value]
        if self.world.size > 1:
            dist.broadcast_object_list(box, src=root, group=self.host_group)
        return box[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of the ranks. They are sent pickled, inside the job only."""
        self.agree()
        gathered = [value] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(gathered, value, group=self.host_group)
        return gathered

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._in_place(dist.all_reduce, torch.zeros(1))

    def agree(self) -> None:
        """Runs before each collective, for a strategy whose ranks may come to another one; does nothing by default."""

    def _in_place(self, collective: Callable[..., object], tensor: Tensor) -> Tensor:
        """Run a collective on a tensor, which may be a slice: Gloo takes memory as it lies."""
        self.agree()
        if self.world.size == 1:
            return tensor
        dense = (tensor.cpu() if self.over_host_memory else tensor).contiguous()
        collective(dense, group=self.host_group if dense.device.type == "cpu" else None)
        return tensor if dense is tensor else tensor.copy_(dense)


def _broadcast_bytes(dense: Tensor, group: dist.ProcessGroup | None) -> None:
    # As bytes, because Gloo knows neither all integers nor eight-bit floats.
    dist.broadcast(dense.view(-1).view(torch.uint8), src=0, group=group)


note_waits(Collectives, _NOTED)

"""Collectives: sums, broadcasts and barriers over all ranks of a job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from trainer.cluster.world import World
from trainer.watch.heartbeat import BATCH_NORM, note_waits, waits

_NOTED = ("all_reduce", "broadcast", "broadcast_tensors", "broadcast_object", "all_gather_object", "barrier", "prepare")


class Collectives(ABC):
    """Sums, broadcasts and barriers over all ranks. Every rank calls the same methods in the same order.

    All follow from `all_reduce` and `broadcast_object`; a transport overrides methods that it can do better.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        note_waits(cls, {name: name for name in _NOTED}, counts=True)

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks, in place; return it."""

    @abstractmethod
    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return rank `root`'s value on every rank. It is sent pickled, inside the job only."""

    @abstractmethod
    def close(self) -> None:
        """Leave the job. Nothing can be exchanged afterwards; a second call does nothing."""

    def start_gradients(self, flat: Tensor, name: str) -> Callable[[], object]:
        """Begin to sum gradients over all ranks, in place; return a function that waits for the sum.

        Other methods may be called meanwhile.

        Args:
            flat: the gradients, one-dimensional and contiguous, on the world's device; not to be changed until then.
            name: the same for each message of its kind and for no other; no two are under way at the same time.
        """
        with waits("gradients"):  # within a backward pass, where nothing else says so
            self.all_reduce(flat)
        return lambda: None

    def sum_statistics(self, tensor: Tensor) -> Tensor:
        """All-reduce statistics of BatchNorm over the global batch, so that the verdict on a hang can name it."""
        with waits(BATCH_NORM, tensor.numel(), counts=True):
            return self.all_reduce(tensor)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with rank 0's, in place; return it."""
        if not self.world.is_root:
            tensor.zero_()
        return self.all_reduce(tensor)

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite each of `tensors` with rank 0's, in place."""
        for tensor in tensors:
            self.broadcast(tensor)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of the ranks."""
        return [self.broadcast_object(value, root=rank) for rank in range(self.world.size)]

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.all_reduce(torch.zeros(1, device=self.world.device))


def in_place(collective: Callable[[Tensor], object], tensor: Tensor) -> Tensor:
    """Run a collective on a tensor, which may be a slice: Gloo takes memory as it lies, and Horovod no strides."""
    dense = tensor.contiguous()
    collective(dense)
    return tensor if dense is tensor else tensor.copy_(dense)

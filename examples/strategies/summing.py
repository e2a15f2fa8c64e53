"""Base of strategies that implement the sum of one flat tensor on the CPU, from which everything else follows."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from trainer.cluster.world import World
from trainer.config import RunConfig
from trainer.strategies.base import Strategy
from trainer.strategies.buckets import BucketSynchronizer
from trainer.strategies.gradients import NamedParameters, Synchronizer
from trainer.watch.heartbeat import waits


class SummingStrategy(Strategy):
    """A strategy that is made of one sum: buckets are summed in a background thread while the backward pass goes on."""

    may_overlap = True
    """Whether `sum_gradients` may be called from another thread."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._background: ThreadPoolExecutor | None = None

    @abstractmethod
    def sum_gradients(self, flat: Tensor) -> None:
        """Sum a message over all ranks, in place.

        It may be called from a background thread, and the strategy's other methods may be called at the same time.

        Args:
            flat: one-dimensional, contiguous, on the CPU; the same length and type on every rank.
        """

    @abstractmethod
    def sum_values(self, flat: Tensor) -> None:
        """Sum any other tensor over all ranks, in place; likewise flat, contiguous and on the CPU."""

    def prepare(self, model: nn.Module, parameters: NamedParameters, config: RunConfig) -> Synchronizer:
        synchronizer = super().prepare(model, parameters, config)
        # A single bucket is full when the backward pass ends, so there is nothing to overlap with.
        overlaps = isinstance(synchronizer, BucketSynchronizer) and synchronizer.buckets[1:]
        if overlaps and self.may_overlap and self._background is None:
            # OpenMP's number of threads is each thread's own, and PyTorch's default would be all cores.
            self._background = ThreadPoolExecutor(1, "exchange", torch.set_num_threads, (torch.get_num_threads(),))
        return synchronizer

    def start_gradients(self, flat: Tensor, name: str) -> Callable[[], object]:
        on_cpu, sending = flat.cpu(), None
        # Once there is a thread, all models send from it, whichever was prepared first: messages keep their order.
        if self._background is not None:
            sending = self._background.submit(self.sum_gradients, on_cpu)
        else:
            with waits("gradients"):  # within a backward pass, where nothing else says so
                self.sum_gradients(on_cpu)

        def wait() -> None:
            if sending is not None:
                sending.result()
            if on_cpu is not flat:
                flat.copy_(on_cpu)

        return wait

    def all_reduce(self, tensor: Tensor) -> Tensor:
        flat = tensor.detach().contiguous().view(-1).cpu()
        self.sum_values(flat)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
        return tensor

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        parts = self.gather_bytes(pickle.dumps(value) if self.world.rank == root else b"")
        return pickle.loads(parts[root])  # noqa: S301 (inside the job only)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [pickle.loads(part) for part in self.gather_bytes(pickle.dumps(value))]  # noqa: S301 (as above)

    def gather_bytes(self, part: bytes) -> list[bytes]:
        """Return every rank's bytes, by a sum in which each rank has zeros in the others' places."""
        rank, size = self.world.rank, self.world.size
        lengths = torch.zeros(size, dtype=torch.int64)
        lengths[rank] = len(part)
        self.sum_values(lengths)
        table = torch.zeros(int(lengths.sum()), dtype=torch.uint8)
        parts = table.split(lengths.tolist())
        if part:
            parts[rank].copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))
        self.sum_values(table)
        return [part.numpy().tobytes() for part in parts]

    def close(self) -> None:
        if self._background is not None:
            self._background.shutdown()
            self._background = None

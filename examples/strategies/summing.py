"""Base of strategies that sum a bucket of gradients on the CPU, in a thread beside the backward pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

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

    def close(self) -> None:
        if self._background is not None:
            self._background.shutdown()
            self._background = None
        super().close()

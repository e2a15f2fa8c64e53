"""Gradient buckets, for strategies with an all-reduce of one flat tensor.

The backward pass produces gradients one by one, roughly in the reverse order of the parameters. Each is scaled into
its place in a flat bucket. A full bucket is all-reduced as one message while the backward pass goes on. All ranks send
their buckets in the same order, whatever the order of the gradients, which rules out a deadlock. Li et al., "PyTorch
Distributed" (VLDB 2020), sections 3.2.2 and 3.2.3, for both ideas.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from trainer.cluster.world import World
from trainer.config import RunConfig
from trainer.errors import ConfigError
from trainer.strategies.base import NamedParameters, Strategy, Synchronizer
from trainer.strategies.buckets import Bucket, make_buckets
from trainer.strategies.gradients import GradientSynchronizer, assign_means
from trainer.watch.heartbeat import waits

Start = Callable[[Tensor], Callable[[], object]]
"""Begins to sum a flat tensor over all ranks, in place; what it returns waits for the sum."""


class BucketedStrategy(Strategy):
    """Base of strategies that only implement the sum of one flat tensor over all ranks."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._background: ThreadPoolExecutor | None = None
        self._seconds: float | None = None

    @abstractmethod
    def sum_gradients(self, flat: Tensor) -> None:
        """Sum a bucket over all ranks, in place.

        With several buckets it is called from a background thread, and the strategy's other methods may be called
        at the same time.

        Args:
            flat: one-dimensional, contiguous, on the CPU; the same length and type on every rank.
        """

    @abstractmethod
    def sum_values(self, flat: Tensor) -> None:
        """Sum any other tensor over all ranks, in place; likewise flat, contiguous and on the CPU."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        flat = tensor.detach().contiguous().view(-1).cpu()
        self.sum_values(flat)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
        return tensor

    def send_gradients(self, flat: Tensor, name: str) -> Tensor:
        on_cpu = flat.cpu()
        if self._background is None:
            self.sum_gradients(on_cpu)
        else:  # which may be sending now; messages keep their order
            self._background.submit(self.sum_gradients, on_cpu).result()
        return flat if on_cpu is flat else flat.copy_(on_cpu)

    def start_gradients(self, flat: Tensor, name: str) -> Callable[[], Tensor]:
        if not self._may_overlap():
            return super().start_gradients(flat, name)
        on_cpu = flat.cpu()
        sent = self._exchange_thread().submit(self.sum_gradients, on_cpu)

        def wait() -> Tensor:
            sent.result()
            return flat if on_cpu is flat else flat.copy_(on_cpu)

        return wait

    def prepare(self, model: nn.Module, parameters: NamedParameters, config: RunConfig) -> Synchronizer:
        self._check(model, config)
        self.broadcast_tensors(tensor.data for tensor in (*model.parameters(), *model.buffers()))
        if not parameters or self.world.size == 1:
            return Synchronizer()
        buckets = buckets_for(parameters, config)
        # A single bucket is full when the backward pass ends, so there is nothing to overlap with.
        if len(buckets) > 1 and self._may_overlap():
            self._exchange_thread()
        self._seconds = self._seconds or 0.0
        return BucketSynchronizer(parameters, buckets, self._start, self.world.size)

    def exchange_seconds(self) -> float | None:
        seconds, self._seconds = self._seconds, None if self._seconds is None else 0.0
        return seconds

    def close(self) -> None:
        if self._background is not None:
            self._background.shutdown()
            self._background = None

    def _start(self, flat: Tensor) -> Callable[[], object]:
        # All models send from the same thread, whichever was prepared first.
        if self._background is not None:
            return self._background.submit(self._timed_sum, flat).result
        with waits("gradients"):  # within the backward pass, where nothing else says so
            self._timed_sum(flat)
        return _nothing

    def _timed_sum(self, flat: Tensor) -> None:
        started = time.perf_counter()
        self.sum_gradients(flat)
        self._seconds = (self._seconds or 0.0) + time.perf_counter() - started

    def _exchange_thread(self) -> ThreadPoolExecutor:
        if self._background is None:
            # OpenMP's number of threads is each thread's own, and PyTorch's default would be all cores.
            self._background = ThreadPoolExecutor(1, "exchange", torch.set_num_threads, (torch.get_num_threads(),))
        return self._background

    def _may_overlap(self) -> bool:
        """Return whether `sum_gradients` may be called from another thread."""
        return True

    def _check(self, model: nn.Module, config: RunConfig) -> None:
        name = type(self).__name__.removesuffix("Strategy")
        if config.reduction == "adasum":
            raise ConfigError(f"reduction is 'adasum', which {name} does not have; valid there is average")


def buckets_for(parameters: NamedParameters, config: RunConfig, device: torch.device | str = "cpu") -> list[Bucket]:
    """Return the buckets of parameters under the settings."""
    held = [parameter for _, parameter in parameters]
    return make_buckets(held, torch.float16 if config.compression == "fp16" else None, device)


class BucketSynchronizer(GradientSynchronizer):
    """Collects gradients in buckets as they become ready, and replaces them by their mean over all ranks.

    Args:
        parameters: each is in one of the buckets.
        buckets: sent in this order.
        start: begins to sum a bucket over all ranks.
        ranks: the world size.
    """

    def __init__(self, parameters: NamedParameters, buckets: list[Bucket], start: Start, ranks: int) -> None:
        super().__init__(parameters)
        self._buckets, self._start, self._scale = buckets, start, 1 / ranks
        self._bucket_of = {place: bucket for bucket in buckets for place in bucket.means}
        self._next = 0

    def on_gradient(self, place: int, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of[place]
        if bucket.wait is not None:
            raise self._twice(place)
        bucket.put(place, parameter.grad, self._scale)
        while self.sends_early and self._next < len(self._buckets) and self._buckets[self._next].is_full:
            self._send_next()

    def _complete(self) -> None:
        """Send what has not been sent, and wait for all of it."""
        parameters = self.parameters
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            for place in bucket.means.keys() - bucket.ready:
                parameter = parameters[place]
                bucket.put(place, parameter.grad if parameter is not None else None, self._scale)
            self._send_next()
        for bucket in self._buckets:
            if bucket.wait is not None:
                bucket.wait()
            held = [parameters[place] for place in bucket.means]
            assign_means(held, [*bucket.means.values()], bucket.has_gradient)
            bucket.empty()
        self._next = 0

    def _send_next(self) -> None:
        self._buckets[self._next].send(self._start)
        self._next += 1


def _nothing() -> None:
    return

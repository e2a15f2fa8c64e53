"""Gradient buckets, for strategies with an all-reduce of one flat tensor.

The backward pass produces gradients one by one, roughly in the reverse order of the parameters. Each is scaled into
its place in a flat bucket. A full bucket is all-reduced as one message while the backward pass goes on. All ranks send
their buckets in the same order, whatever the order of the gradients, which rules out a deadlock. Li et al., "PyTorch
Distributed" (VLDB 2020), sections 3.2.2 and 3.2.3, for both ideas.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from trainer.cluster.world import World
from trainer.config import RunConfig
from trainer.errors import ConfigError
from trainer.strategies.base import NamedParameters, Strategy, Synchronizer
from trainer.strategies.gradients import GradientSynchronizer, assign_means
from trainer.watch.heartbeat import waits

BUCKET_BYTES = 4 * 1024 * 1024
"""Least size of a bucket but the last: large enough for its latency not to count."""


class Bucket:
    """Gradients that are all-reduced as one message.

    Args:
        parameters: by their places among all; of one type. Their gradients fill the bucket.
        wire_type: type that is sent; the parameters' own, or a smaller one that rounds.
        device: which holds the message.
    """

    def __init__(self, parameters: dict[int, Tensor], wire_type: torch.dtype, device: torch.device | str) -> None:
        sizes = [p.numel() for p in parameters.values()]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=wire_type, device=device)
        """The gradients, and behind them a number for each parameter: not 0 where a rank has a gradient of it."""
        *pieces, self._has_gradient = self.flat.split([*sizes, len(sizes)])
        self.means = {
            place: _in_order_of(p, piece) for (place, p), piece in zip(parameters.items(), pieces, strict=True)
        }
        """By the parameter's place: its part of the message, in its shape."""
        self.ready: set[int] = set()
        self._absent: set[int] = set()
        self.wait: Callable[[], object] | None = None
        """Waits for the message, once it is on its way."""

    @property
    def is_full(self) -> bool:
        return len(self.ready) == len(self.means)

    def send(self, start: Callable[[Tensor], Callable[[], object]]) -> None:
        """Have `start` begin to send the message."""
        self._has_gradient.fill_(1.0)
        if self._absent:  # else nothing is copied to the device, which would wait for it
            self._has_gradient.copy_(torch.tensor([float(place not in self._absent) for place in self.means]))
        self.wait = start(self.flat)

    def has_gradient(self, index: int) -> bool:
        """Return whether any rank has a gradient of the parameter with this number within the bucket."""
        return bool(self._has_gradient[index])

    def empty(self) -> None:
        """Make ready for the next pass."""
        self.ready.clear()
        self._absent.clear()
        self.wait = None

    def put(self, place: int, gradient: Tensor | None, scale: float) -> None:
        """Scale a gradient into its place in one pass; None counts as zeros."""
        mean = self.means[place]
        self.ready.add(place)
        if gradient is None:
            mean.zero_()
            self._absent.add(place)
        elif gradient.is_sparse:
            mean.copy_(gradient.to_dense() * scale)
        elif (gradient.dtype, gradient.device) == (mean.dtype, mean.device):
            torch.mul(gradient.detach(), scale, out=mean)
        else:
            mean.copy_(gradient.detach() * scale)


def _in_order_of(parameter: Tensor, piece: Tensor) -> Tensor:
    """Return the flat piece in the parameter's shape and order of memory, which optimizers are quickest on."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return piece.as_strided(parameter.shape, strides)


def make_buckets(
    parameters: Sequence[Tensor], wire_type: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> list[Bucket]:
    """Return buckets for the parts of `divide`."""
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    parts = [{places[id(parameter)]: parameter for parameter in part} for part in divide(parameters)]
    return [Bucket(part, _smaller(next(iter(part.values())).dtype, wire_type), device) for part in parts]


def divide(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Divide parameters by type and into parts of `BUCKET_BYTES`, in the order in which gradients are expected."""
    by_type: dict[torch.dtype, list[list[Tensor]]] = {}
    room: dict[torch.dtype, int] = {}
    for parameter in reversed(parameters):
        lists = by_type.setdefault(parameter.dtype, [])
        if room.get(parameter.dtype, 0) <= 0:
            lists.append([])
            room[parameter.dtype] = BUCKET_BYTES
        lists[-1].append(parameter)
        room[parameter.dtype] -= parameter.numel() * parameter.element_size()
    return [part for lists in by_type.values() for part in lists]


def _smaller(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and dtype.is_floating_point and wanted.itemsize < dtype.itemsize else dtype


Start = Callable[[Tensor], Callable[[], object]]
"""Begins to sum a flat tensor over all ranks, in place; what it returns waits for the sum."""


class BucketedStrategy(Strategy):
    """Base of strategies that only implement the sum of one flat tensor over all ranks."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._background: ThreadPoolExecutor | None = None

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

    def start_gradients(self, flat: Tensor, name: str) -> Callable[[], object]:
        on_cpu = flat.cpu()
        if self._may_overlap():  # one thread for all messages keeps their order
            wait_for_sum: Callable[[], object] = self._exchange_thread().submit(self.sum_gradients, on_cpu).result
        else:
            self.sum_gradients(on_cpu)
            wait_for_sum = _nothing

        def wait() -> None:
            wait_for_sum()
            if on_cpu is not flat:
                flat.copy_(on_cpu)

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
        return BucketSynchronizer(parameters, buckets, self._start, self.world.size)

    def close(self) -> None:
        if self._background is not None:
            self._background.shutdown()
            self._background = None

    def _start(self, flat: Tensor) -> Callable[[], object]:
        # All models send from the same thread, whichever was prepared first.
        if self._background is not None:
            return self._background.submit(self.sum_gradients, flat).result
        with waits("gradients"):  # within the backward pass, where nothing else says so
            self.sum_gradients(flat)
        return _nothing

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

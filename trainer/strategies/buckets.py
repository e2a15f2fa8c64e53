"""Gradient buckets, which are all-reduced while the backward pass goes on.

The backward pass produces gradients singly, roughly in the reverse order of the parameters. Each is scaled into its
part of a flat bucket. A full bucket is all-reduced as a single message while the backward pass goes on. All ranks send
their buckets in the same order, whatever the order of the gradients, which rules out a deadlock. Li et al., "PyTorch
Distributed" (VLDB 2020), sections 3.2.2 and 3.2.3, for both ideas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trainer.strategies.collectives import Collectives
from trainer.strategies.gradients import GradientSynchronizer, NamedParameters, assign_means
from trainer.watch.spans import WAIT, in_span

BUCKET_BYTES = 4 * 1024 * 1024
"""The smallest size of a bucket, except for the last: from this size on, latency is negligible."""


class Bucket:
    """Gradients that are all-reduced in a single message.

    Args:
        parameters: the parameters whose gradients fill the bucket, by their index in the model; all of the same type.
        wire_type: type that is sent if it is smaller than the type of the parameters, so that it rounds.
    """

    def __init__(self, parameters: dict[int, Tensor], wire_type: torch.dtype | None = None) -> None:
        sizes = [parameter.numel() for parameter in parameters.values()]
        first = next(iter(parameters.values()))
        is_rounded = wire_type is not None and first.is_floating_point() and wire_type.itemsize < first.itemsize
        dtype = wire_type if is_rounded else first.dtype
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=dtype, device=first.device)
        """The gradients, and behind them a number for each parameter: 0 where no rank has a gradient of it, negative
        where those that have one have a sparse one."""
        *pieces, self._has_gradient = self.flat.split([*sizes, len(sizes)])
        self.means = {
            index: _in_order_of(parameter, piece)
            for (index, parameter), piece in zip(parameters.items(), pieces, strict=True)
        }
        """By the parameter's index, its part of the message, in its shape."""
        self.ready: set[int] = set()
        self._unusual: dict[int, float] = {}
        """The numbers of parameters that have no dense gradient on this rank."""
        self.wait: Callable[[], object] | None = None
        """Waits until the message is summed; None if it was not sent yet."""

    @property
    def is_full(self) -> bool:
        return len(self.ready) == len(self.means)

    def send(self, ranks: Collectives, name: str) -> None:
        """Begin to sum the message over all ranks, under a name that no other has at a time."""
        self._has_gradient.fill_(1.0)
        if self._unusual:  # else nothing is copied to the device, which would wait for it
            self._has_gradient.copy_(torch.tensor([self._unusual.get(index, 1.0) for index in self.means]))
        self.wait = ranks.start_gradients(self.flat, name)

    def has_gradient(self, index: int) -> float:
        """Return the sum of the ranks' numbers for the parameter with this index within the bucket; see `flat`."""
        return float(self._has_gradient[index])

    def empty(self) -> None:
        """Empty the bucket for the next pass."""
        self.ready.clear()
        self._unusual.clear()
        self.wait = None

    def put(self, index: int, gradient: Tensor | None, scale: float) -> None:
        """Scale a gradient into its part of the message; None counts as zeros."""
        mean = self.means[index]
        self.ready.add(index)
        if gradient is None:
            mean.zero_()
            self._unusual[index] = 0.0
        elif gradient.is_sparse:
            mean.copy_(gradient.detach().to_dense() * scale)
            self._unusual[index] = -(2.0**-10)  # less than a dense one on another rank, which makes the sum dense
        elif (gradient.dtype, gradient.device) == (mean.dtype, mean.device):
            torch.mul(gradient.detach(), scale, out=mean)
        else:
            mean.copy_(gradient.detach() * scale)


def _in_order_of(parameter: Tensor, piece: Tensor) -> Tensor:
    """Return the flat piece in the parameter's shape and order in memory, in which optimizers are fastest."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return piece.as_strided(parameter.shape, strides)


def divide(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Divide parameters by type and into parts of `BUCKET_BYTES`, in the order in which gradients are expected.

    Returns:
        The parts, each as a list of the parameters' indices.
    """
    by_type: dict[torch.dtype, list[list[int]]] = {}
    room: dict[torch.dtype, int] = {}
    for index, parameter in reversed([*enumerate(parameters)]):
        parts = by_type.setdefault(parameter.dtype, [])
        if room.get(parameter.dtype, 0) <= 0:
            parts.append([])
            room[parameter.dtype] = BUCKET_BYTES
        parts[-1].append(index)
        room[parameter.dtype] -= parameter.numel() * parameter.element_size()
    return [part for parts in by_type.values() for part in parts]


def gradient_groups(parameters: Sequence[Tensor], *, over_nccl: bool) -> list[list[int]] | None:
    """Return the indices of parameters whose gradients Horovod sends together; None: in each cycle what is ready.

    Ranks on CPUs send buckets: to send each gradient once it is ready, all ranks negotiate again and again, in threads
    that take cores from the backward pass. Measured on CPUs only; between GPUs a large model keeps Horovod's default.
    """
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return None if over_nccl and size > BUCKET_BYTES else divide(parameters)


class BucketSynchronizer(GradientSynchronizer):
    """Collects gradients in buckets as they become ready, and replaces them by their mean over all ranks.

    Args:
        wire_type: see `Bucket`.
    """

    def __init__(self, parameters: NamedParameters, ranks: Collectives, wire_type: torch.dtype | None = None) -> None:
        super().__init__(parameters)
        self._ranks, self._scale = ranks, 1 / ranks.world.size
        parts = divide([parameter for _, parameter in parameters])
        self.buckets = [Bucket({index: parameters[index][1] for index in part}, wire_type) for part in parts]
        self._bucket_of = {index: bucket for bucket in self.buckets for index in bucket.means}
        self._next = 0

    def on_gradient(self, index: int, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of[index]
        if bucket.wait is not None:
            raise self._completed_twice(index)
        bucket.put(index, parameter.grad, self._scale)
        while self.sends_early and self._next < len(self.buckets) and self.buckets[self._next].is_full:
            self._send_next()

    def complete(self) -> None:
        """Send what has not been sent, and wait for all of it."""
        parameters = self.parameters
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            for index in bucket.means.keys() - bucket.ready:
                parameter = parameters[index]
                bucket.put(index, parameter.grad if parameter is not None else None, self._scale)
            self._send_next()
        for bucket in self.buckets:
            if bucket.wait is not None:
                in_span(WAIT, bucket.wait)
            held = [parameters[index] for index in bucket.means]
            assign_means(held, [*bucket.means.values()], bucket.has_gradient)
            bucket.empty()
        self._next = 0

    def _send_next(self) -> None:
        # All ranks send the buckets in this order, so that no two wait for each other.
        self.buckets[self._next].send(self._ranks, f"bucket.{self.number}.{self._next}")
        self._next += 1

"""Buckets: gradients of one type in one flat tensor, in the order in which a backward pass produces them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

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


def _smaller(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point and wanted.itemsize < own.itemsize else own

"""Buckets: gradients of one type in one flat tensor, in the order in which a backward pass produces them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

BUCKET_BYTES = 4 * 1024 * 1024
"""Least size of a bucket but the last: large enough for its latency not to count."""


class Bucket:
    """Gradients that are all-reduced as one message.

    Args:
        parameters: of one type; their gradients fill the bucket.
        wire_type: type that is sent; the parameters' own, or a smaller one that rounds.
    """

    def __init__(self, parameters: Sequence[Tensor], wire_type: torch.dtype) -> None:
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=wire_type)
        pieces = self.flat.split([p.numel() for p in parameters])
        self.places = {p: _in_order_of(p, piece) for p, piece in zip(parameters, pieces, strict=True)}
        self.ready: set[Tensor] = set()
        self.sent: Future[None] | None = None

    @property
    def is_full(self) -> bool:
        return len(self.ready) == len(self.places)

    def put(self, parameter: Tensor, scale: float) -> None:
        """Scale a gradient into its place in one pass. A parameter without a gradient counts as zero."""
        place, gradient = self.places[parameter], parameter.grad
        self.ready.add(parameter)
        if gradient is None:
            place.zero_()
        elif (gradient.dtype, gradient.device) == (place.dtype, place.device):
            torch.mul(gradient, scale, out=place)
        else:
            place.copy_(gradient * scale)

    def assign_gradients(self) -> None:
        """Make the all-reduced values the parameters' gradients, without a copy where the types are the same."""
        for parameter, place in self.places.items():
            parameter.grad = place.to(device=parameter.device, dtype=parameter.dtype)
        self.ready.clear()
        self.sent = None


def _in_order_of(parameter: Tensor, piece: Tensor) -> Tensor:
    """Return the flat piece in the parameter's shape and order of memory, which optimizers are quickest on."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return piece.as_strided(parameter.shape, strides)


def make_buckets(parameters: Sequence[Tensor], wire_type: torch.dtype | None = None) -> list[Bucket]:
    """Return buckets for the parts of `divide`."""
    return [Bucket(part, _smaller(part[0].dtype, wire_type)) for part in divide(parameters)]


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
    return wanted if wanted is not None and wanted.itemsize < own.itemsize else own

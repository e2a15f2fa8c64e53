"""The mean of many tensors over all ranks, in one message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Transport:
    """How a strategy adds up tensors. Both calls work in place, and are collective."""

    send: Callable[[Tensor, str], Tensor]
    """Sums a flat tensor that stands for gradients; is given a name that each message of its kind has."""
    all_reduce: Callable[[Tensor], Tensor]
    """Sums any other tensor."""
    ranks: int
    """The world size."""


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values of `dtype` are added up: 16 bits are too few, and Horovod has no bfloat16."""
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


def mean_of_all(tensors: Sequence[Tensor], transport: Transport, name: str) -> list[Tensor]:
    """Return each tensor's mean over all ranks, in its `exact_type`. One message for each such type. Collective.

    Args:
        tensors: of the same shapes and types on every rank; they stay as they are.
        name: of the messages.
    """
    by_type: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        by_type.setdefault(exact_type(tensor.dtype), []).append(place)
    means: dict[int, Tensor] = {}
    for dtype, places in by_type.items():
        flat = torch.cat([tensors[place].detach().reshape(-1).to(dtype) for place in places])
        transport.send(flat, f"{name}.{str(dtype).removeprefix('torch.')}").div_(transport.ranks)
        pieces = flat.split([tensors[place].numel() for place in places])
        means.update((place, piece.view(tensors[place].shape)) for place, piece in zip(places, pieces, strict=True))
    return [means[place] for place in range(len(tensors))]

"""The mean of many tensors over all ranks, in one message; and gradient synchronization in one piece by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.strategies.base import NamedParameters
from trainer.strategies.gradients import GradientSynchronizer, assign_means


@dataclass(frozen=True, kw_only=True)
class Transport:
    """How a strategy adds up tensors. All calls work in place, and are collective."""

    send: Callable[[Tensor, str], Tensor]
    """Sums a flat tensor that stands for gradients; is given a name that each message of its kind has."""
    start: Callable[[Tensor, str], Callable[[], Tensor]]
    """Begins what `send` does; what it returns waits for the sum."""
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
    messages = _messages(tensors, name)
    for message in messages:
        transport.send(message.flat, message.name)
    return _means(messages, [tensor.shape for tensor in tensors], transport.ranks)


def start_mean(tensors: Sequence[Tensor], transport: Transport, name: str) -> Callable[[], list[Tensor]]:
    """Begin what `mean_of_all` does, with the tensors' values of now; return what waits for the means. Collective."""
    messages, shapes = _messages(tensors, name), [tensor.shape for tensor in tensors]
    started = [transport.start(message.flat, message.name) for message in messages]

    def wait() -> list[Tensor]:
        for sent in started:
            sent()
        return _means(messages, shapes, transport.ranks)

    return wait


@dataclass(frozen=True)
class _Message:
    name: str
    places: list[int]
    """Of the tensors that it consists of."""
    flat: Tensor


def _messages(tensors: Sequence[Tensor], name: str) -> list[_Message]:
    by_type: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        by_type.setdefault(exact_type(tensor.dtype), []).append(place)
    return [
        _Message(
            f"{name}.{str(dtype).removeprefix('torch.')}",
            places,
            torch.cat([tensors[place].detach().reshape(-1).to(dtype) for place in places]),
        )
        for dtype, places in by_type.items()
    ]


def _means(messages: Sequence[_Message], shapes: Sequence[torch.Size], ranks: int) -> list[Tensor]:
    means: dict[int, Tensor] = {}
    for message in messages:
        pieces = message.flat.div_(ranks).split([shapes[place].numel() for place in message.places])
        means.update((place, piece.view(shapes[place])) for place, piece in zip(message.places, pieces, strict=True))
    return [means[place] for place in range(len(shapes))]


class WholeSynchronizer(GradientSynchronizer):
    """Makes the gradients the mean over all ranks in one message for each type of number.

    Args:
        parameters: those whose gradients are all-reduced.
    """

    def __init__(self, parameters: NamedParameters, transport: Transport) -> None:
        super().__init__(parameters)
        self._transport = transport
        self.updates = 0
        """Backward passes whose gradients were all-reduced."""

    def _complete(self) -> None:
        self._average()
        self.updates += 1

    def _average(self) -> None:
        gradients = self.gradients()
        counts = self._replace_by_mean(gradients)
        assign_means(self.parameters, gradients, lambda place: bool(counts[place]))

    def _replace_by_mean(self, gradients: Sequence[Tensor]) -> Tensor:
        """Write the means over the gradients; return a number for each, not 0 where any rank has one."""
        *means, counts = mean_of_all([*gradients, self.has_gradients()], self._transport, "whole")
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean)
        return counts

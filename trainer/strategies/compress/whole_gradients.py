"""Gradient synchronization in one piece, at the end of the backward pass, under every strategy with an all-reduce.

Nothing is sent before the last gradient is there: what is sent may then be chosen by looking at all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.strategies.base import NamedParameters, Strategy
from trainer.strategies.gradients import GradientSynchronizer, assign_means

_NUMBERS = itertools.count()


class WholeSynchronizer(GradientSynchronizer):
    """Makes the gradients the mean over all ranks in one message for each type of number.

    Args:
        parameters: those whose gradients are all-reduced.
    """

    def __init__(self, parameters: NamedParameters, strategy: Strategy) -> None:
        super().__init__(parameters)
        self._strategy = strategy
        self._number = next(_NUMBERS)  # the messages of two models must not have the same names
        self.updates = 0
        """Backward passes whose gradients were all-reduced."""

    def mean_of_all(self, tensors: Sequence[Tensor], name: str) -> list[Tensor]:
        """Return each tensor's mean over all ranks, in its `exact_type`. One message for each such type. Collective.

        Args:
            tensors: of the same shapes and types on every rank; they stay as they are.
            name: of the messages.
        """
        return self.start_mean(tensors, name)()

    def start_mean(self, tensors: Sequence[Tensor], name: str) -> Callable[[], list[Tensor]]:
        """Begin what `mean_of_all` does, with the tensors' values of now; return what waits for the means."""
        messages, shapes = self._messages(tensors, name), [tensor.shape for tensor in tensors]
        started = [self._strategy.start_gradients(message.flat, message.name) for message in messages]

        def wait() -> list[Tensor]:
            for sent in started:
                sent()
            return self._means(messages, shapes)

        return wait

    def _messages(self, tensors: Sequence[Tensor], name: str) -> list[_Message]:
        by_type: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(tensors):
            by_type.setdefault(exact_type(tensor.dtype), []).append(place)
        return [
            _Message(
                f"{name}.{str(dtype).removeprefix('torch.')}.{self._number}",
                places,
                torch.cat([tensors[place].detach().reshape(-1).to(dtype) for place in places]),
            )
            for dtype, places in by_type.items()
        ]

    def _means(self, messages: Sequence[_Message], shapes: Sequence[torch.Size]) -> list[Tensor]:
        means: dict[int, Tensor] = {}
        for message in messages:
            message.flat.div_(self._strategy.world.size)
            pieces = message.flat.split([shapes[place].numel() for place in message.places])
            means.update((place, part.view(shapes[place])) for place, part in zip(message.places, pieces, strict=True))
        return [means[place] for place in range(len(shapes))]

    def _complete(self) -> None:
        self._average()
        self.updates += 1

    def _average(self) -> None:
        gradients = self.gradients()
        counts = self._replace_by_mean(gradients)
        assign_means(self.parameters, gradients, lambda place: bool(counts[place]))

    def _replace_by_mean(self, gradients: Sequence[Tensor]) -> Tensor:
        """Write the means over the gradients; return a number for each, not 0 where any rank has one."""
        *means, counts = self.mean_of_all([*gradients, self.has_gradients()], "whole")
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean)
        return counts


@dataclass(frozen=True)
class _Message:
    name: str
    places: list[int]
    """Of the tensors that it consists of."""
    flat: Tensor


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values of `dtype` are added up: 16 bits are too few, and Horovod has no bfloat16."""
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype

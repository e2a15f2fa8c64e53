"""Gradient synchronization in one piece, at the end of the backward pass, under every strategy with an all-reduce.

Nothing is sent before the last gradient is there: what is sent may then be chosen by looking at all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.strategies.collectives import Collectives
from trainer.strategies.gradients import GradientSynchronizer, NamedParameters, assign_means

WIRE_TYPES: dict[str | None, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The type that is sent under a compression which rounds."""
_NUMBERS = itertools.count()


class WholeSynchronizer(GradientSynchronizer):
    """Makes the gradients the mean over all ranks in one message for each type of number."""

    def __init__(self, parameters: NamedParameters, ranks: Collectives) -> None:
        super().__init__(parameters)
        self._ranks = ranks
        self._number = next(_NUMBERS)  # the messages of two models must not have the same names
        self.updates = 0
        """Number of updates so far."""

    def mean_of_all(self, tensors: Sequence[Tensor], name: str, wire_type: torch.dtype | None = None) -> list[Tensor]:
        """Return each tensor's mean over all ranks, in its `exact_type`. One message for each such type. Collective.

        Args:
            tensors: of the same shapes and types on every rank; they stay as they are.
            name: of the messages.
            wire_type: what is sent in place of the exact type, so that it rounds.
        """
        places_by_type: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(tensors):
            places_by_type.setdefault(exact_type(tensor.dtype), []).append(place)
        started = []
        for dtype, places in places_by_type.items():
            flat = torch.cat([tensors[place].detach().reshape(-1).to(dtype) for place in places])
            rounds = wire_type is not None and dtype.is_floating_point
            if rounds:
                flat = flat.div_(self._ranks.world.size).to(wire_type)  # before the sum, which may overflow
            message = f"{name}.{str(dtype).removeprefix('torch.')}.{self._number}"
            started.append((dtype if rounds else None, places, flat, self._ranks.start_gradients(flat, message)))

        means: dict[int, Tensor] = {}
        for exact, places, flat, wait in started:
            wait()
            mean = flat.div_(self._ranks.world.size) if exact is None else flat.to(exact)
            pieces = mean.split([tensors[place].numel() for place in places])
            means |= {place: piece.view(tensors[place].shape) for place, piece in zip(places, pieces, strict=True)}
        return [means[place] for place in range(len(tensors))]

    def _complete(self) -> None:
        self._average()
        self.updates += 1

    def _average(self) -> None:
        gradients = self.gradients()
        counts = self._replace_by_mean(gradients)
        assign_means(self.parameters, gradients, lambda place: bool(counts[place]))

    def _replace_by_mean(self, gradients: Sequence[Tensor]) -> Tensor:
        """Overwrite the gradients with their means; return for each a number that is not 0 if any rank has it."""
        *means, counts = self.mean_of_all([*gradients, self.has_gradients()], "whole")
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean)
        return counts


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values of `dtype` are added up: 16 bits are too few."""
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype

"""Gradient synchronization after the backward pass, under every strategy with an all-reduce.

Nothing is sent before the last gradient is complete, so that what is sent may depend on all gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.strategies.collectives import Collectives
from trainer.strategies.gradients import GradientSynchronizer, NamedParameters, assign_means

WIRE_TYPES: dict[str | None, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""By the name of a compression that rounds, the type that is sent."""


class WholeSynchronizer(GradientSynchronizer):
    """Makes the gradients the mean over all ranks, with a message for each data type."""

    def __init__(self, parameters: NamedParameters, ranks: Collectives) -> None:
        super().__init__(parameters)
        self._ranks = ranks
        self.updates = 0
        """Number of updates so far."""

    def mean_of_all(self, tensors: Sequence[Tensor], name: str, wire_type: torch.dtype | None = None) -> list[Tensor]:
        """Return each tensor's mean over all ranks, in its `exact_type`; a message for each such type. Collective.

        Args:
            tensors: of the same shapes and types on every rank; they stay as they are.
            name: of the messages.
            wire_type: type that is sent instead of the exact type, so that it rounds.
        """
        indices_by_type: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            indices_by_type.setdefault(exact_type(tensor.dtype), []).append(index)
        started = []
        for dtype, indices in indices_by_type.items():
            flat = torch.cat([tensors[index].detach().reshape(-1).to(dtype) for index in indices])
            rounds = wire_type is not None and dtype.is_floating_point
            if rounds:
                flat = flat.div_(self._ranks.world.size).to(wire_type)  # before the sum, which may overflow
            message = f"{name}.{str(dtype).removeprefix('torch.')}.{self.number}"
            started.append((dtype if rounds else None, indices, flat, self._ranks.start_gradients(flat, message)))

        means: dict[int, Tensor] = {}
        for exact, indices, flat, wait in started:
            wait()
            mean = flat.div_(self._ranks.world.size) if exact is None else flat.to(exact)
            pieces = mean.split([tensors[index].numel() for index in indices])
            means |= {index: piece.view(tensors[index].shape) for index, piece in zip(indices, pieces, strict=True)}
        return [means[index] for index in range(len(tensors))]

    @torch.no_grad()
    def complete(self) -> None:
        self._average()
        self.updates += 1

    def _average(self) -> None:
        gradients = self.gradients()
        counts = self._replace_by_mean(gradients)
        assign_means(self.parameters, gradients, lambda index: bool(counts[index]))

    def _replace_by_mean(self, gradients: Sequence[Tensor]) -> Tensor:
        """Overwrite the gradients with their means; return for each a number that is not 0 if any rank has it."""
        *means, counts = self.mean_of_all([*gradients, self.has_gradients()], "whole")
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean)
        return counts


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values of `dtype` are added up: 16 bits are too few."""
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype

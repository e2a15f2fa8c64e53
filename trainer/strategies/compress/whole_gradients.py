"""Gradient synchronization in one piece, at the end of the backward pass, under every strategy with an all-reduce.

Nothing is sent before the last gradient is there: what is sent may then be chosen by looking at all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trainer.strategies.base import NamedParameters
from trainer.strategies.compress.flat import Transport, mean_of_all
from trainer.strategies.gradients import GradientSynchronizer, assign_means


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

"""Gradient synchronization in one piece, after the backward pass, under every strategy whose gradients are all-reduced.

Gradients stay on their rank until the step: what is sent of them may then be chosen by looking at all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.strategies.base import NamedParameters, Synchronizer
from trainer.strategies.flat import Transport, mean_of_all
from trainer.strategies.gradient_guard import GradientGuard


class WholeSynchronizer(Synchronizer):
    """Makes the gradients the mean over all ranks in one message for each type of number.

    Args:
        parameters: those whose gradients are all-reduced.
        guard: of these parameters.
    """

    def __init__(
        self, model: nn.Module, parameters: NamedParameters, guard: GradientGuard, transport: Transport
    ) -> None:
        super().__init__(model)
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._guard, self._transport = guard, transport
        self._is_local = self._is_done = False
        self.updates = 0
        """Calls of `finish` that all-reduced gradients."""

    def keep_local(self, local: bool) -> None:
        self._is_local = local

    def before_backward(self) -> None:
        self._guard.check()
        self._is_done = False

    def after_backward(self) -> None:
        # Nothing is on its way. But a change that other strategies refuse would here be a change of the local
        # gradients, which is not what was meant.
        if not self._is_local:
            self._guard.note()

    def finish(self) -> None:
        if self._is_done:
            return
        self._guard.complete(self._average, self._transport.all_reduce)
        self.updates += 1
        self._is_done = True

    def reopen(self) -> None:
        self._is_done = False

    def _average(self, _: object) -> None:
        gradients = []
        for parameter in self._parameters:
            if parameter.grad is None:  # another rank may have one
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        with torch.no_grad():
            self._replace_by_mean(gradients)

    def _replace_by_mean(self, gradients: Sequence[Tensor]) -> None:
        for gradient, mean in zip(gradients, mean_of_all(gradients, self._transport, "whole"), strict=True):
            gradient.copy_(mean)

"""Adasum, which Horovod computes: combines the steps that the ranks have taken by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.strategies.base import NamedParameters
from trainer.strategies.gradients import GradientSynchronizer


class AdasumSynchronizer(GradientSynchronizer):
    """Adasum (Maleki et al. 2020): each rank takes a step of its own, and the steps are combined, not the gradients."""

    def __init__(self, hvd: Any, parameters: NamedParameters, compression: Any) -> None:
        super().__init__(parameters)
        self._hvd, self._compression = hvd, compression
        self._before: list[Tensor] = []

    def _complete(self) -> None:
        """Leave each rank its own gradients, with which it takes a step of its own."""

    def before_step(self) -> None:
        self._before = [parameter.detach().clone() for parameter in self.parameters if parameter is not None]

    def after_step(self) -> None:
        if not self._before:  # a step within a step, of a class that calls its parent's
            return
        parameters = [parameter for parameter in self.parameters if parameter is not None]
        started = []
        for name, parameter, before in zip(self.names, parameters, self._before, strict=True):
            delta, context = self._compression.compress(parameter.detach() - before)
            started.append((self._hvd.allreduce_async_(delta, name=name, op=self._hvd.Adasum), context))
        for parameter, before, (handle, context) in zip(parameters, self._before, started, strict=True):
            combined = self._compression.decompress(self._hvd.synchronize(handle), context)
            with torch.no_grad():
                parameter.copy_(before.add_(combined))
        self._before = []

"""Loss scaling for fp16, on torch's GradScaler, for any number of optimizers that step when they like.

Micikevicius et al., "Mixed Precision Training" (2018), section 3.2. All ranks hold the same mean gradients, so all of
them skip the same steps and keep the same scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.errors import TrainerError


class LossScaler:
    """Scales losses, unscales gradients, and keeps a step whose gradients overflowed from changing anything."""

    def __init__(self, device_type: str) -> None:
        self._scaler = torch.amp.GradScaler(device_type)
        self._unscaled: set[Optimizer] = set()
        self._overflowed: set[Optimizer] = set()
        self._stepped: set[Optimizer] = set()
        self._hidden: dict[Optimizer, list[tuple[Tensor, Tensor]]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, and the steps since it last changed."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what `state_dict` has returned."""
        self._scaler.load_state_dict(state)

    def scale(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, once until the next `update`, and note whether they are finite."""
        gradients = gradients_of(optimizer)
        if optimizer in self._unscaled or not gradients:
            return
        self._scaler.unscale_(optimizer)
        self._unscaled.add(optimizer)
        # Now, because what the user does to the gradients may make an infinity finite.
        if not math.isfinite(torch.nn.utils.get_total_norm(gradients)):
            self._overflowed.add(optimizer)

    def before_step(self, optimizer: Optimizer) -> None:
        """Hide gradients that overflowed: an optimizer leaves parameters without a gradient alone."""
        if optimizer in self._overflowed:
            self._overflowed.discard(optimizer)
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._hidden[optimizer] = [(one, one.grad) for one in parameters if one.grad is not None]
            optimizer.zero_grad(set_to_none=True)

    def after_step(self, optimizer: Optimizer) -> None:
        self._stepped.add(optimizer)
        for parameter, gradient in self._hidden.pop(optimizer, ()):
            parameter.grad = gradient

    def update(self, optimizers: Iterable[Optimizer]) -> None:
        """Adapt the scale to what was unscaled since the last call, before the next backward pass.

        Args:
            optimizers: all; one that holds gradients of an unfinished update gets them in the new scale.

        Raises:
            TrainerError: gradients were unscaled for a step that has not been taken.
        """
        if not self._unscaled:
            return
        for optimizer in self._unscaled - self._stepped:
            if gradients_of(optimizer):
                raise TrainerError(
                    "a backward pass would add scaled gradients to unscaled ones; under precision fp16, call step or "
                    "zero_grad after run.synchronize or run.clip_grad_norm_"
                )
        before = self._scaler.get_scale()
        self._scaler.update()
        ratio = self._scaler.get_scale() / before
        for optimizer in optimizers if ratio != 1.0 else ():
            for gradient in gradients_of(optimizer) if optimizer not in self._unscaled else ():
                gradient.mul_(ratio)
        self._unscaled.clear()
        self._stepped.clear()
        self._overflowed.clear()


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients that the optimizer's parameters have."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

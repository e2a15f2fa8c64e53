"""Loss scaling for fp16, on torch's GradScaler, for any number of optimizers that step when they like.

Micikevicius et al., "Mixed Precision Training" (2018), section 3.2. All ranks hold the same mean gradients, so all of
them skip the same steps and keep the same scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.loop.gradients import Marks, gradients_of, has_changed, mark, parameters_of


class LossScaler:
    """Scales losses, unscales gradients, and keeps a step whose gradients overflowed from changing anything."""

    def __init__(self, device_type: str) -> None:
        self._scaler = torch.amp.GradScaler(device_type)
        self._scaled: WeakSet[Optimizer] = WeakSet()
        """Optimizers whose gradients a backward pass has added to, times the scale."""
        self._unscaled: WeakSet[Optimizer] = WeakSet()
        """Optimizers whose gradients were scaled since the scale was adapted, and are no longer."""
        self._overflowed: WeakSet[Optimizer] = WeakSet()
        self._stepped: WeakSet[Optimizer] = WeakSet()
        self._before: dict[Optimizer, Marks] = {}
        """The gradients that the running backward pass adds to."""
        self._hidden: dict[Optimizer, Marks] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, and the steps since it last changed."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what `state_dict` has returned."""
        self._scaler.load_state_dict(state)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def before_backward(self, optimizers: Iterable[Optimizer]) -> None:
        """Adapt the scale to the steps since the last backward pass, and scale the gradients that this one adds to."""
        self.update()
        for optimizer in self._unscaled:  # which has not stepped since: another pass of the same step
            scale = self._scaler.get_scale()
            for gradient in gradients_of(optimizer):
                gradient.detach().mul_(scale)
        self._scaled.update(self._unscaled)
        self._unscaled.clear()
        self._before = {optimizer: mark(parameters_of(optimizer)) for optimizer in optimizers}

    def after_backward(self) -> None:
        """Note which optimizers' gradients the backward pass has added to."""
        for optimizer, before in self._before.items():
            if any(has_changed(parameter, before) for parameter in parameters_of(optimizer)):
                self._scaled.add(optimizer)

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide gradients that are scaled by the scale, and note whether they are finite."""
        for optimizer in optimizers:
            gradients = gradients_of(optimizer)
            # The mean of ranks whose passes have reached it, and this rank's has not.
            came_from_others = not self._before.get(optimizer)
            if not gradients or not (optimizer in self._scaled or came_from_others):
                continue
            self._scaled.discard(optimizer)
            # It unscales once for each step; and an optimizer that is gone may have had the same id.
            self._scaler._per_optimizer_states.pop(id(optimizer), None)
            self._scaler.unscale_(optimizer)
            self._unscaled.add(optimizer)
            # Now, because what the user does to the gradients may make an infinity finite.
            if not math.isfinite(torch.nn.utils.get_total_norm(gradients)):
                self._overflowed.add(optimizer)
        self._before = {}

    def before_step(self, optimizer: Optimizer) -> None:
        """Hide gradients that overflowed: an optimizer leaves parameters without a gradient alone."""
        if optimizer in self._overflowed:
            self._overflowed.discard(optimizer)
            self._hidden[optimizer] = mark(parameters_of(optimizer))
            optimizer.zero_grad(set_to_none=True)

    def after_step(self, optimizer: Optimizer) -> None:
        """Note a step, and give back the gradients that were hidden from it."""
        self._stepped.add(optimizer)
        for parameter, (gradient, _) in self._hidden.pop(optimizer, {}).items():
            parameter.grad = gradient

    def update(self) -> None:
        """Adapt the scale to the steps since the last backward pass."""
        finished = {
            optimizer for optimizer in self._unscaled if optimizer in self._stepped or not gradients_of(optimizer)
        }
        if not finished:
            return
        before = self._scaler.get_scale()
        self._scaler.update()
        ratio = self._scaler.get_scale() / before
        for optimizer in self._scaled if ratio != 1.0 else ():
            for gradient in gradients_of(optimizer):
                gradient.detach().mul_(ratio)
        self._unscaled.difference_update(finished)
        self._overflowed.difference_update(finished)
        self._stepped.clear()

"""FSDPSynchronizer: the passes of a model that `fully_shard` has sharded, and the gradients that they leave."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from trainer.errors import TrainerError
from trainer.strategies.base import Synchronizer, without_gradient


class FSDPSynchronizer(Synchronizer):
    """`fully_shard`, whose backward pass leaves on each rank its part of the mean gradient.

    A backward pass within `keep_local` leaves whole gradients of this rank, which nobody can read, and which the next
    one adds to. One parameter then has a gradient of zeros, so that it is seen whether somebody drops them.
    """

    forward: FSDPModule  # type: ignore[assignment]  # which is a module as well

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._model = model
        self._is_local = self._is_running = self._is_new = False
        self._mark: tuple[nn.Parameter, Tensor, int] | None = None
        self._passes: list[FSDPModule] = []
        parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._default_passes = parts
        own = weakref.ref(self)
        handles = [model.register_forward_pre_hook(partial_call(own, "_before_forward"), prepend=True)]
        handles += [model.register_forward_hook(partial_call(own, "_after_forward"))]
        handles += [part.register_forward_pre_hook(partial_call(own, "_on_part")) for part in map(_as_module, parts)]

        def retire() -> None:
            for handle in handles:
                handle.remove()

        self.retire = retire
        self.forward.set_requires_gradient_sync(True)

    def keep_local(self, local: bool) -> None:
        self._is_local = local
        self.forward.set_requires_gradient_sync(not local)

    def before_backward(self) -> None:
        if self._mark_is_gone():
            raise TrainerError(
                "gradients of passes within no_sync were dropped after a forward pass; call zero_grad before the "
                "forward pass"
            )
        self._is_running = True

    def after_backward(self) -> None:
        self._is_running = False
        self._is_new = self._is_new or not self._is_local
        self._drop_mark()
        if self._is_local:
            smallest = min(self._trained(), key=lambda one: one.numel())
            gradient = smallest.grad if smallest.grad is not None else torch.zeros_like(smallest)
            smallest.grad = gradient
            self._mark = (smallest, gradient, gradient._version)

    def finish(self) -> None:
        if self._mark is not None and not self._mark_is_gone():
            raise TrainerError(
                "the last backward pass before a step ran within no_sync, and strategy 'fsdp' sums gradients in a "
                "backward pass only; leave no_sync for the last one"
            )
        if not self._is_new:
            return
        self._is_new = False
        absent = [(name, one) for name, one in self._model.named_parameters() if one.requires_grad and one.grad is None]
        if absent and len(absent) < len(self._trained()):
            raise TrainerError(without_gradient(absent))

    def on_evaluation_step(self, has_samples: bool) -> None:
        if has_samples:
            self._passes = []
            return
        for part in self._passes or self._default_passes:
            part.unshard()
            part.reshard()

    def _trained(self) -> list[nn.Parameter]:
        return [one for one in self._model.parameters() if one.requires_grad]

    def _mark_is_gone(self) -> bool:
        if self._mark is None:
            return False
        parameter, gradient, version = self._mark
        return parameter.grad is not gradient or gradient._version != version

    def _drop_mark(self) -> None:
        self._mark = None

    def _before_forward(self, *_: Any) -> None:
        # What an error in a pass has left, or gradients that zero_grad has not reached.
        if self._is_running or self._mark_is_gone():
            self._is_running = False
            self._drop_mark()
            self.forward.reset_iter_state()

    def _on_part(self, part: nn.Module, *_: Any) -> None:
        if not torch.is_grad_enabled():
            self._passes.append(cast(FSDPModule, part))

    def _after_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        for one in tree_leaves(outputs):
            if isinstance(one, Tensor) and one.requires_grad:
                one.register_hook(self._on_output_gradient)

    def _on_output_gradient(self, gradient: Tensor) -> Tensor | None:
        self.on_gradient()
        return torch.zeros_like(gradient) if self.is_weightless else None


def _as_module(part: FSDPModule) -> nn.Module:
    return cast(nn.Module, part)


def partial_call(owner: weakref.ref[Any], name: str) -> Any:
    """Return a hook that calls a method of its owner, as long as there is one."""

    def hook(*args: Any) -> None:
        own = owner()
        if own is not None:
            getattr(own, name)(*args)

    return hook

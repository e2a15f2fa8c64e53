"""FSDPSynchronizer: the passes of a model that `fully_shard` has sharded, and the gradients that they leave."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from trainer.errors import TrainerError
from trainer.strategies.base import NamedParameters, Synchronizer, foreign_pass


class EvaluationPasses:
    """The forward passes of an evaluation's step, so that a rank without samples can take part in their gathering."""

    def __init__(self) -> None:
        self.known: list[FSDPModule] = []
        """Parts of the model that was prepared last, in its order: one pass of it, where no step was seen."""
        self._seen: list[FSDPModule] = []
        self._is_in_step = False

    def begin_step(self) -> None:
        """Note the passes that follow, of all models in the order of their calls."""
        self._seen, self._is_in_step = [], True

    def add(self, part: FSDPModule) -> None:
        """Note a pass of a part. One of a training ends the evaluation."""
        self._is_in_step = self._is_in_step and not torch.is_grad_enabled()
        if self._is_in_step:
            self._seen.append(part)

    def repeat(self) -> None:
        """Gather what the other ranks do in the evaluation's last step, in which this one has no samples."""
        for part in self._seen if self._is_in_step else self.known:
            part.unshard()
            part.reshard()
        self._is_in_step = False


class FSDPSynchronizer(Synchronizer):
    """`fully_shard`, whose backward pass leaves on each rank its part of the mean gradient.

    A backward pass within `keep_local` leaves whole gradients of this rank, which nobody can read, and which the next
    one adds to. One parameter then has a gradient of zeros, so that it is seen whether somebody drops them.

    Args:
        model: as `fully_shard` has left it.
        passes: told of each forward pass of a part.
        sums_elsewhere: whether such gradients are added up in another type than the parameters'.
    """

    def __init__(self, model: nn.Module, passes: EvaluationPasses, *, sums_elsewhere: bool) -> None:
        super().__init__()
        self._passes = passes
        self._sums_elsewhere = sums_elsewhere
        self._root = cast(FSDPModule, model)
        self._owned = {
            one: _owned_parameters(cast(nn.Module, one), f"{name}." if name else "")
            for name, one in model.named_modules()
            if isinstance(one, FSDPModule)
        }
        """The parts that are gathered one at a time, in the model's order, with their parameters."""
        passes.known = list(self._owned)
        self._trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._is_local = self._is_running = self._is_in_pass = False
        # Names of parameters that a backward pass has reached since the last step.
        self._reached: set[str] = set()
        self._mark: tuple[nn.Parameter, Tensor, int] | None = None
        # Whole parameters by id, which the modules have within a pass only.
        self._watched: dict[int, nn.Parameter] = {}
        # Hooks outlive a synchronizer that another one has replaced, unless they are removed.
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(_calls(self._before_forward), prepend=True),
            *(cast(nn.Module, one).register_forward_pre_hook(_calls(self._on_part, one)) for one in self._owned),
        ]
        self._root.set_requires_gradient_sync(True)
        # A parameter without a gradient on one rank has one of zeros there: each rank sends as much as the others.
        self._root.set_reduce_scatter_unused_params(True)

    def keep_local(self, local: bool) -> None:
        self._is_local = local
        self._root.set_requires_gradient_sync(not local)

    def retire(self) -> None:
        for handle in self._handles:
            handle.remove()

    def before_backward(self) -> None:
        self._is_in_pass = True
        if self._mark_is_gone():
            raise TrainerError(
                "gradients of passes within no_sync were dropped between a forward and its backward pass; call "
                "zero_grad before the forward pass"
            )

    def after_backward(self) -> None:
        self._is_in_pass = self._is_running = False
        self._mark = None
        if self._is_local and self._trained:
            smallest = min(self._trained.values(), key=lambda one: one.numel())
            gradient = smallest.grad if smallest.grad is not None else torch.zeros_like(smallest)
            smallest.grad = gradient
            self._mark = (smallest, gradient, gradient._version)

    def before_step(self) -> None:
        if self._mark is not None and not self._mark_is_gone():
            raise TrainerError(
                "the last backward pass before a step ran within no_sync, and strategy 'fsdp' sums gradients in a "
                "backward pass only; leave no_sync for the last one"
            )
        absent = [(name, one) for name, one in self._trained.items() if name not in self._reached]
        if self._reached and absent:
            raise TrainerError(_without_gradient(absent))
        self._reached.clear()

    def _mark_is_gone(self) -> bool:
        if self._mark is None:
            return False
        parameter, gradient, version = self._mark
        return parameter.grad is not gradient or gradient._version != version

    def _before_forward(self, *_: Any) -> None:
        # What an error in a pass has left, or gradients of this rank that zero_grad does not reach.
        if not self._is_running and not self._mark_is_gone():
            return
        if self._mark is not None and self._sums_elsewhere:
            raise TrainerError(
                "gradients of passes within no_sync were dropped, or a pass after them has failed, which "
                "parameter_dtype and reduce_dtype do not allow for; step after each update, or leave these settings out"
            )
        if self._mark is not None:
            self._mark[0].grad = None  # so that an update that goes on is told of it
        for parameter in self._watched.values():
            parameter.grad = None
        self._is_running, self._mark = False, None
        self._reached.clear()
        self._root.reset_iter_state()

    def _on_part(self, part: FSDPModule, *_: Any) -> None:
        """Watch the gradients of a part's whole parameters, which its modules have within a pass only."""
        self._passes.add(part)
        if not torch.is_grad_enabled():
            return
        for path, module, name in self._owned[part]:
            parameter = getattr(module, name)
            if parameter.requires_grad and id(parameter) not in self._watched:  # the same ones in each pass
                self._watched[id(parameter)] = parameter
                self._handles.append(parameter.register_hook(_calls(self._on_parameter_gradient, path)))

    def _on_parameter_gradient(self, path: str, gradient: Tensor) -> Tensor | None:
        if not self._is_in_pass:
            raise foreign_pass()
        self._is_running = True
        self._reached.add(path)
        return torch.zeros_like(gradient) if self.is_weightless else None


def _owned_parameters(part: nn.Module, prefix: str) -> list[tuple[str, nn.Module, str]]:
    """Return the parameters that are gathered with a part: path in the model, module, and name in the module."""
    owned = [(f"{prefix}{name}", part, name) for name, _ in part.named_parameters(recurse=False)]
    for name, child in part.named_children():
        owned += [] if isinstance(child, FSDPModule) else _owned_parameters(child, f"{prefix}{name}.")
    return owned


def _calls(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """Return a hook that calls a method as long as its object lives: a model must not keep its synchronizer alive."""
    weak = weakref.WeakMethod(method)

    def hook(*rest: Any) -> Any:
        found = weak()
        return found(*first, *rest) if found is not None else None

    return hook


def _without_gradient(absent: NamedParameters) -> str:
    others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
    return (
        f"parameter {absent[0][0]}{others} got no gradient from backward, and strategy 'fsdp' needs one of every "
        "parameter in each step; freeze what is not trained (requires_grad_(False)) and call run.prepare afterwards, "
        "or take another strategy"
    )

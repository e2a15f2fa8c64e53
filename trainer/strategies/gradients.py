"""Synchronizers: make a model's gradients the mean over all ranks, during and after a backward pass."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainer.errors import TrainerError

_NUMBERS = itertools.count()
NamedParameters = Sequence[tuple[str, nn.Parameter]]


class Synchronizer:
    """Gradient synchronization of a model. This base class does nothing, as is right on a single rank.

    Calls for a backward pass: `before_backward`, the pass itself, `after_backward`, then `complete`, unless the
    gradients stay on this rank. No synchronizer holds a strong reference to the model or its parameters, so that they
    are freed as soon as nobody else holds them.
    """

    def __init__(self) -> None:
        self.is_reached = True
        """Whether the last backward pass has reached a parameter of this model; true where that is not known."""
        self.sends_early = True
        """Whether a gradient may be sent before the backward pass is over. False with several models, because ranks may
        reach them in different orders."""
        self.has_local_gradients = False
        """Whether local passes have left gradients on this rank."""
        self.stepped: set[int] | None = None
        """Ids of the optimizers that have stepped since the last all-reduce; None before the first one."""

    def before_backward(self, *, is_local: bool = False, is_weightless: bool = False) -> None:
        """Prepare for a backward pass, which may add to the mean gradients of an earlier pass.

        Args:
            is_local: whether the pass's gradients stay on this rank, to be sent by a later pass.
            is_weightless: whether the pass has weight 0, so that nothing of it, not even a NaN, may enter the mean.
        """

    def after_backward(self) -> None:
        """Note which gradients the backward pass has produced, before `complete`."""

    def complete(self) -> None:
        """Make the gradients the mean over all ranks. Collective, even for a rank whose pass has not reached them."""

    def reduce_after_error(self) -> None:
        """Send zeros for a pass that raised an error here, so that the other ranks do not hang. Collective.

        This rank's gradients stay as the error has left them.
        """

    def retire(self) -> None:
        """Leave the gradients alone from now on: another synchronizer takes over this model."""

    def before_step(self) -> None:
        """Prepare for a step of an optimizer."""

    def after_step(self) -> None:
        """Combine the ranks' weights, if each rank has taken a different step."""

    def average_weights(self, optimizers: Collection[Optimizer] = ()) -> None:
        """Average the weights over all ranks, if they differ between updates. Collective.

        Args:
            optimizers: the states of these optimizers are averaged as well.
        """

    @property
    def weights_are_equal(self) -> bool:
        """Whether all ranks have the same weights after each update."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, the same on all ranks. Collective."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`, which may come from another number of ranks or another class of synchronizer."""


def foreign_pass() -> TrainerError:
    """Return the error for a `loss.backward()` in place of `run.backward(loss)`."""
    return TrainerError(
        "loss.backward() neither weighs the batch nor all-reduces the gradients; call run.backward(loss) instead"
    )


class GradientSynchronizer(Synchronizer):
    """Base of synchronizers that all-reduce whole gradients.

    In each pass, every rank sends the gradient of every parameter. If the pass has not reached the parameter, this is
    the gradient that an earlier pass has left, or zeros. So ranks may reach different parameters, and the graph may
    change from step to step. If no rank has a gradient of a parameter, it stays None, as in a single process: with
    zeros, weight decay and momentum would change the parameter.

    The hooks on the parameters keep their synchronizer alive, which holds the parameters weakly. Strong references
    would leak: Python cannot collect a cycle that goes through a hook, and the run would keep every model that was ever
    prepared.

    Args:
        parameters: the parameters whose gradients are all-reduced.
    """

    def __init__(self, parameters: NamedParameters) -> None:
        super().__init__()
        self.number = next(_NUMBERS)
        """The same on all ranks; makes the names of this model's messages differ from those of other models."""
        self.names = [name for name, _ in parameters]
        self._parameters = [weakref.ref(parameter) for _, parameter in parameters]
        self._shapes = [torch.empty_like(parameter, device="meta") for _, parameter in parameters]
        self._device = parameters[0][1].device
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_hook, index))
            for index, (_, parameter) in enumerate(parameters)
        ]
        self._hooks_so_far = RemovableHandle.next_id
        self._reached: set[int] = set()
        self._is_local = self._is_in_pass = False

    @property
    def parameters(self) -> list[nn.Parameter | None]:
        """The parameters, in the order in which they were given; None for a parameter that was freed."""
        return [parameter() for parameter in self._parameters]

    def gradients(self) -> list[Tensor]:
        """Return the gradients in the order of the parameters, with zeros where there is none."""
        return [
            torch.zeros_like(shape, device=self._device)
            if parameter is None or parameter.grad is None
            else parameter.grad
            for parameter, shape in zip(self.parameters, self._shapes, strict=True)
        ]

    def has_gradients(self) -> Tensor:
        """Return 1 for each parameter that has a gradient on this rank, else 0; in the first parameter's type."""
        has = [float(parameter is not None and parameter.grad is not None) for parameter in self.parameters]
        return torch.tensor(has, dtype=self._shapes[0].dtype, device=self._device)

    def before_backward(self, *, is_local: bool = False, is_weightless: bool = False) -> None:
        self._reached.clear()
        self._is_local, self._is_in_pass = is_local, True
        if self._hooks_so_far != RemovableHandle.next_id:  # a hook was registered somewhere
            self._hooks_so_far = RemovableHandle.next_id
            self._come_last()

    def _come_last(self) -> None:
        """Put our hooks behind the user's, however late those were registered: what theirs change is sent as well."""
        for hook in self._hooks:
            registered = hook.hooks_dict_ref()
            if registered and hook.id in registered and next(reversed(registered)) != hook.id:
                registered[hook.id] = registered.pop(hook.id)

    def reduce_after_error(self) -> None:
        parameters = [parameter for parameter in self.parameters if parameter is not None]
        kept = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self.complete()
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient

    def after_backward(self) -> None:
        self._is_in_pass, self.is_reached = False, bool(self._reached)
        if self._is_local and self.is_reached:
            self.has_local_gradients = True

    def retire(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def on_gradient(self, index: int, parameter: nn.Parameter) -> None:
        """Start to send a gradient that is complete on this rank; by default do nothing."""

    def _on_hook(self, index: int, parameter: Tensor) -> None:
        if not self._is_in_pass:
            raise foreign_pass()
        if not self._is_local:
            self.on_gradient(index, parameter)  # type: ignore[arg-type]
        self._reached.add(index)

    def _completed_twice(self, index: int) -> TrainerError:
        """Return the error for a second gradient of the same parameter in a pass, the first of which may be sent."""
        return TrainerError(
            f"one backward pass has completed the gradient of {self.names[index]} twice, as reentrant activation "
            "checkpointing of a block that is used twice does; give use_reentrant=False to torch.utils.checkpoint"
        )


def assign_means(
    parameters: Sequence[nn.Parameter | None], means: Sequence[Tensor], has_gradient: Callable[[int], float]
) -> None:
    """Set the parameters' gradients to the means, in the types and layouts that they have on this rank.

    A mean is copied out of its buffer, so that a gradient which is kept beyond `zero_grad` survives the next pass.

    Args:
        has_gradient: returns whether any rank has a gradient of the parameter at this index, as a negative number if
            it is sparse. It is only called where this rank has none.
    """
    for index, (parameter, mean) in enumerate(zip(parameters, means, strict=True)):
        if parameter is None:
            continue
        gradient = parameter.grad
        if gradient is None:
            kind = has_gradient(index)
            dense = torch.empty_like(parameter).copy_(mean) if kind else None
            parameter.grad = dense.to_sparse(1) if dense is not None and kind < 0 else dense
        elif gradient.is_sparse:
            parameter.grad = mean.to(parameter.dtype).to_sparse(gradient.sparse_dim())
        elif gradient is not mean:
            gradient.detach().copy_(mean)


def as_real(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones, in the same memory; any other tensor as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_shared(gradient: Tensor) -> bool:
    """Return whether something else holds the gradient's memory: the running pass, which may still read it there.

    Of `h + position.unsqueeze(0)`, autograd gives `position` a view of the gradient of h.
    """
    return torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) > _HOLDERS_OF_ONE


_ONE = torch.zeros(1)
_HOLDERS_OF_ONE = torch._C._storage_Use_Count(_ONE.untyped_storage()._cdata)

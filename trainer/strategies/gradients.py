"""Synchronizers: what happens to the gradients of one model in and after a backward pass."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.errors import TrainerError
from trainer.watch.heartbeat import note_waits

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class Synchronizer:
    """Gradient synchronization of one model. This one has nothing to do, as on a single rank.

    A backward pass is `before_backward`, the pass itself, `after_backward`, and `complete` where the gradients do not
    stay on this rank. It holds neither the model nor its parameters, so that both are free when nobody else holds them.
    """

    def __init__(self) -> None:
        self.is_weightless = False
        """Whether the next backward pass has weight 0, so that not even a NaN of it may enter the mean."""
        self.is_reached = False
        """Whether the last backward pass has left a gradient of this model."""
        self.sends_early = True
        """Whether a gradient may be sent before the backward pass is over. Not with several models: ranks may reach
        them in different orders."""
        self.has_local_gradients = False
        """Whether there are gradients that `keep_local` has kept on this rank."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        note_waits(
            cls,
            {"complete": "gradients", "discard": "gradients", "after_step": "weights", "settle": "weights"},
            counts=False,
        )

    def keep_local(self, local: bool) -> None:
        """Keep the gradients of the next forward and backward passes on this rank, or all-reduce them again."""

    def before_backward(self) -> None:
        """Prepare for a backward pass, which may add to the mean gradients of an earlier one."""

    def after_backward(self) -> None:
        """Note what the backward pass has left, before `complete`."""

    def complete(self) -> None:
        """Make the gradients the mean over all ranks. Collective, also for a rank whose pass has not reached them."""

    def discard(self) -> None:
        """Send the rest of a pass that has ended in an error, for which other ranks wait. Collective as `complete` is.

        Gradients stay as the error has left them.
        """

    def retire(self) -> None:
        """Leave the gradients alone from now on: another synchronizer takes over this model."""

    def before_step(self) -> None:
        """Prepare for a step of an optimizer."""

    def after_step(self) -> None:
        """Combine the ranks' steps where they differ."""

    def settle(self, optimizers: Collection[Optimizer] = ()) -> None:
        """Make the weights the same on all ranks where they differ between updates. Collective.

        Args:
            optimizers: those whose states are made the same as well.
        """

    @property
    def weights_are_equal(self) -> bool:
        """Whether all ranks have the same weights after each update."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it; the same on all ranks. Collective."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` has returned, on any number of ranks, or with another synchronizer's state."""


def foreign_pass() -> TrainerError:
    """Return the error of a backward pass that is not the handle's."""
    return TrainerError(
        "loss.backward() neither weighs the batch nor all-reduces the gradients; call run.backward(loss) instead"
    )


class GradientSynchronizer(Synchronizer):
    """Base of synchronizers that all-reduce whole gradients.

    Every rank sends every parameter's gradient in each pass: one that a pass has not reached counts as it was left by
    an earlier pass, or as zeros. So ranks may reach different parameters, and a graph may change from step to step.
    A parameter that has got no gradient on any rank has none afterwards, as in one process: weight decay and momentum
    would move it.

    The hooks on the parameters own their synchronizer, which holds the parameters weakly. Python cannot collect a
    cycle that goes through a hook, and a synchronizer that the run held would keep every model that was ever prepared.

    Args:
        parameters: those whose gradients are all-reduced.
    """

    def __init__(self, parameters: NamedParameters) -> None:
        super().__init__()
        self.names = [name for name, _ in parameters]
        self._parameters = [weakref.ref(parameter) for _, parameter in parameters]
        self._shapes = [torch.empty_like(parameter, device="meta") for _, parameter in parameters]
        self._device = parameters[0][1].device
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_hook, place))
            for place, (_, parameter) in enumerate(parameters)
        ]
        self._reached: set[int] = set()
        self._is_local = self._is_in_pass = False

    @property
    def parameters(self) -> list[nn.Parameter | None]:
        """The parameters, each at its place; None for one that is gone."""
        return [parameter() for parameter in self._parameters]

    def gradients(self) -> list[Tensor]:
        """Return the gradients, each at its parameter's place, and zeros where there is none."""
        return [
            torch.zeros_like(shape, device=self._device)
            if parameter is None or parameter.grad is None
            else parameter.grad
            for parameter, shape in zip(self.parameters, self._shapes, strict=True)
        ]

    def has_gradients(self) -> Tensor:
        """Return 1 for each parameter that has a gradient here, and 0 for the others, in the first parameter's type."""
        has = [float(parameter is not None and parameter.grad is not None) for parameter in self.parameters]
        return torch.tensor(has, dtype=self._shapes[0].dtype, device=self._device)

    def keep_local(self, local: bool) -> None:
        self._is_local = local

    def before_backward(self) -> None:
        self._reached.clear()
        self._is_in_pass = True
        self._run_last()

    def discard(self) -> None:
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

    @torch.no_grad()
    def complete(self) -> None:
        self._complete()
        self.has_local_gradients = False

    def retire(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def on_gradient(self, place: int, parameter: nn.Parameter) -> None:
        """Begin to send a gradient which is complete on this rank; does nothing by default."""

    @abstractmethod
    def _complete(self) -> None:
        """Make all gradients the mean over all ranks."""

    def _on_hook(self, place: int, parameter: Tensor) -> None:
        if not self._is_in_pass:
            raise foreign_pass()
        if not self._is_local:
            self.on_gradient(place, parameter)  # type: ignore[arg-type]
        self._reached.add(place)

    def _run_last(self) -> None:
        """Move the hooks behind the user's, however late those were registered: what they change is sent as well."""
        for hook, parameter in zip(self._hooks, self.parameters, strict=True):
            registered = getattr(parameter, "_post_accumulate_grad_hooks", None)
            if registered and hook.id in registered and next(reversed(registered)) != hook.id:
                registered[hook.id] = registered.pop(hook.id)

    def _twice(self, place: int) -> TrainerError:
        return TrainerError(
            f"one backward pass has completed the gradient of {self.names[place]} twice, as reentrant activation "
            "checkpointing of a block that is used twice does; give use_reentrant=False to torch.utils.checkpoint"
        )


def assign_means(
    parameters: Sequence[nn.Parameter | None], means: Sequence[Tensor], has_gradient: Callable[[int], bool]
) -> None:
    """Set the parameters' gradients to the means, in the types and layouts that they have on this rank.

    A mean is copied: the gradient stays what it is when the next pass sends, for who keeps it beyond `zero_grad`.

    Args:
        has_gradient: by a parameter's place here, whether any rank has a gradient of it; asked where this one has none.
    """
    for place, (parameter, mean) in enumerate(zip(parameters, means, strict=True)):
        if parameter is None:
            continue
        gradient = parameter.grad
        if gradient is None:
            parameter.grad = torch.empty_like(parameter).copy_(mean) if has_gradient(place) else None
        elif gradient.is_sparse:
            parameter.grad = mean.to(parameter.dtype).to_sparse(gradient.sparse_dim())
        elif gradient is not mean:
            gradient.detach().copy_(mean)

"""Strategy: how the ranks synchronize gradients, weights and values."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.config import RunConfig
from trainer.errors import TrainerError
from trainer.launch.marks import note_waits
from trainer.launch.world import World

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class Synchronizer:
    """Gradient synchronization of one model. This one has nothing to do, as on a single rank.

    Args:
        forward: the module to call, which is the model or a wrapper around it.
    """

    def __init__(self, forward: nn.Module) -> None:
        self.forward = forward
        self.retire: Callable[[], object] = _nothing
        """Leaves the gradients alone from now on: another synchronizer takes over this model. Holds no model."""
        self.on_gradient: Callable[[], object] = _nothing
        """Called in every backward pass, by a synchronizer whose strategy `shards`."""
        self.is_weightless = False
        """Whether the next backward pass counts for nothing, and must not bring a NaN into the mean."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        names = {**dict.fromkeys(("before_backward", "finish", "after_step"), "gradients"), "settle": "weights"}
        note_waits(cls, names, counts=False)

    def keep_local(self, local: bool) -> None:
        """Keep the gradients of the next forward and backward passes on this rank, or all-reduce them again."""

    def before_backward(self) -> None:
        """Let a further backward pass add to gradients that are being all-reduced."""

    def after_backward(self) -> None:
        """Note the gradients that are being all-reduced, so that `finish` can tell whether somebody changed them."""

    def finish(self) -> None:
        """Wait until the gradients are the mean over all ranks. Collective; a second call does nothing.

        Raises:
            TrainerError: a gradient was changed while it was being all-reduced.
        """

    def reopen(self) -> None:
        """Let the next `finish` all-reduce again, also where no backward pass has run since."""

    def before_step(self) -> None:
        """Prepare for a step of an optimizer on finished gradients."""

    def after_step(self) -> None:
        """Combine what the step has done, where that is not the same on all ranks."""

    def settle(self, optimizers: Collection[Optimizer] = ()) -> None:
        """Make the weights the same on all ranks where they differ between updates. Collective.

        Args:
            optimizers: those whose states are made the same as well.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it; the same on all ranks. Collective."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` has returned, on any number of ranks, or with another synchronizer's state."""


def _nothing() -> None:
    return


class GradientGuard:
    """Notices gradients that are changed while they are being all-reduced, and parameters that have none.

    Args:
        parameters: those whose gradients are all-reduced.
        ranks_may_differ: whether a parameter may be without a gradient, also on some ranks only.
    """

    def __init__(self, parameters: NamedParameters, *, ranks_may_differ: bool) -> None:
        self.ranks_may_differ = ranks_may_differ
        self._parameters = parameters
        self._seen: list[tuple[str, nn.Parameter, Tensor, int]] = []

    def note(self) -> None:
        """Note the gradients as they are. PyTorch counts the changes of each tensor."""
        self._seen = [(name, p, p.grad, p.grad._version) for name, p in self._parameters if p.grad is not None]

    def check(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients were dropped since, as `zero_grad()` does.

        Raises:
            TrainerError: a gradient was changed or replaced.
        """
        for name, parameter, gradient, version in self._seen:
            if parameter.grad is not None and (parameter.grad is not gradient or gradient._version != version):
                raise TrainerError(
                    f"the gradient of {name} was changed between backward and step, while it was being all-reduced; "
                    "call run.clip_grad_norm_ to clip, or run.synchronize first, or zero_grad(set_to_none=True)"
                )
        dropped = [parameter for _, parameter, _, _ in self._seen if parameter.grad is None]
        self._seen = []
        return dropped

    def complete(
        self,
        wait: Callable[[Sequence[nn.Parameter]], object],
        all_reduce: Callable[[Tensor], Tensor],
        *,
        between_passes: bool = False,
    ) -> None:
        """Wait for the gradients, and leave those of dropped and absent parameters out. Collective.

        Args:
            wait: makes the gradients the mean over all ranks; is given the parameters whose gradients were dropped.
            all_reduce: sums a tensor over all ranks, in place.
            between_passes: a further pass of the same step follows, which may reach what this one has left out.

        Raises:
            TrainerError: see `check` and `check_absent`.
        """
        if not between_passes:
            self.check_absent()
        absent = self.absent()
        dropped = self.check()
        wait(dropped)
        for parameter in dropped:
            parameter.grad = None
        if between_passes or self.ranks_may_differ:
            self.drop_absent(absent, all_reduce)

    def absent(self) -> NamedParameters:
        """Return the parameters that have no gradient, and had none when the gradients were noted."""
        if len(self._seen) == len(self._parameters):
            return []
        seen = {parameter for _, parameter, _, _ in self._seen}
        return [(name, one) for name, one in self._parameters if one.grad is None and one not in seen]

    def check_absent(self) -> None:
        """Refuse a step in which only a part of the parameters has a gradient, unless the ranks may differ.

        A rank without any takes part in the all-reduce: another one may have them.

        Raises:
            TrainerError: a part of the parameters has none.
        """
        absent = [] if self.ranks_may_differ else self.absent()
        if absent and len(absent) < len(self._parameters):
            raise TrainerError(without_gradient(absent))

    def drop_absent(self, absent: NamedParameters, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """Take the gradient of zeros from the parameters that have got none on any rank, as on a single rank.

        Weight decay and momentum would move them. Collective.
        """
        here = {parameter for _, parameter in absent}
        device = self._parameters[0][1].device
        counts = all_reduce(torch.tensor([float(one not in here) for _, one in self._parameters], device=device))
        for (_, parameter), count in zip(self._parameters, counts.tolist(), strict=True):
            if count == 0:
                parameter.grad = None


def without_gradient(absent: NamedParameters) -> str:
    """Return the line for parameters that have got no gradient."""
    others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
    return (
        f"parameter {absent[0][0]}{others} got no gradient from backward; freeze what is not trained "
        "(requires_grad_(False)) and call run.prepare afterwards, or set dynamic_graph=True where a step may leave "
        "parameters out"
    )


_COLLECTIVES = (
    *("prepare", "all_reduce", "broadcast", "broadcast_tensors", "broadcast_object", "all_gather_object", "barrier"),
    "broadcast_buffers",
)


class Strategy(ABC):
    """Gradient synchronization and collectives. It knows nothing of datasets or of the training loop.

    The constructor joins the job, so every rank has to make its strategy. All methods are collective: every rank
    calls them, in the same order.
    """

    shards = False
    """Whether each rank keeps a part of the parameters only: `prepare` then moves the model to the device as well."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.tuning: Mapping[str, str] = {}
        """What was set for this host, and why; for the first line of output and for the run's record."""
        self.description = str(world)
        """Ranks and transport, in a few words."""
        self.is_over_nccl = False
        """Whether `all_reduce` of a tensor on the world's device takes NCCL."""
        self.has_whole_gradients = True
        """Whether each rank computes all parameters' gradients, which compression powersgd and sync_every need."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        note_waits(cls, {name: name for name in _COLLECTIVES}, counts=True)

    @abstractmethod
    def prepare(self, model: nn.Module, parameters: NamedParameters, config: RunConfig) -> Synchronizer:
        """Broadcast rank 0's weights and buffers; return what makes the gradients the mean over all ranks.

        Args:
            model: on the world's device.
            parameters: those of the model that require a gradient.
            config: compression, reduction and dynamic_graph are used here.

        Raises:
            ConfigError: the strategy cannot train this model with these settings.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks, in place; return it."""

    def send_gradients(self, flat: Tensor, name: str) -> Tensor:
        """Sum `flat`, which stands for gradients, over all ranks, in place; return it.

        Args:
            flat: one-dimensional and contiguous, on the world's device.
            name: the same for each message of its kind, and of no other.
        """
        return self.all_reduce(flat)

    @abstractmethod
    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return rank `root`'s value on every rank. It is sent pickled, inside the job only."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def close(self) -> None:
        """Leave the job. The strategy cannot be used afterwards; a second call does nothing."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with rank 0's, in place; return it."""
        if not self.world.is_root:
            tensor.zero_()
        return self.all_reduce(tensor)

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite each of `tensors` with rank 0's, in place."""
        for tensor in tensors:
            self.broadcast(tensor)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of the ranks."""
        return [self.broadcast_object(value, root=rank) for rank in range(self.world.size)]

    def exchange_seconds(self) -> float | None:
        """Return the seconds spent in all-reduces of gradients since the last call; None where it cannot tell."""
        return None

    def current(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what `prepare` has put into the model for this parameter, which may be the parameter itself."""
        return parameter

    def adopt(self, optimizer: Optimizer) -> None:
        """Give the optimizer rank 0's state, and the parameters that `prepare` has put into its model."""
        broadcast_optimizer_state(self, optimizer)

    def on_evaluation_step(self, has_samples: bool) -> None:
        """Follow a step of an evaluation; where this rank has no samples, take part in the others' forward passes."""
        return

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Broadcast rank 0's buffers: BatchNorm's running statistics, which differ with each rank's batches."""
        self.broadcast_tensors(model.buffers())


def broadcast_optimizer_state(strategy: Strategy, optimizer: Optimizer) -> None:
    """Broadcast rank 0's optimizer state, if it has any. A fresh optimizer stays untouched.

    Horovod's own `broadcast_optimizer_state` makes a fresh optimizer take a step on zero gradients to
    have a state to send, which lets weight decay shrink the weights and counts as Adam's first step.
    """
    state = optimizer.state_dict()
    root_has_state, state = strategy.broadcast_object((bool(state["state"]), _on_cpu(state)))
    if strategy.world.is_root:
        return
    if root_has_state:
        optimizer.load_state_dict(state)
    else:
        optimizer.state.clear()


def _on_cpu(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_on_cpu(value) for value in state)
    return copy.copy(state)

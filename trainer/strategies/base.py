"""Strategy: how the ranks synchronize gradients, weights and values."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.cluster.world import World
from trainer.config import RunConfig
from trainer.data.base import Loader
from trainer.errors import ConfigError, TrainerError
from trainer.watch.heartbeat import BATCH_NORM, note_waits, waits
from trainer.watch.recorder import Recorder

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class Synchronizer:
    """Gradient synchronization of one model. This one has nothing to do, as on a single rank.

    A backward pass is `before_backward`, the pass itself, `after_backward`, and `complete` where the gradients do not
    stay on this rank. It holds neither the model nor its parameters, so that both are free when nobody else holds them.
    """

    def __init__(self) -> None:
        self.is_weightless = False
        """Whether the next backward pass counts for nothing, and must not bring a NaN into the mean."""
        self.is_reached = False
        """Whether the last backward pass has left a gradient of this model."""
        self.sends_early = True
        """Whether a gradient may be sent before the backward pass is over. Not with several models: ranks may reach
        them in different orders."""
        self.has_local_gradients = False
        """Whether gradients of this rank alone are left, of passes that `keep_local` has kept here."""

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
        """Combine what the step has done, where that is not the same on all ranks."""

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
    """Whether each rank keeps a part of the parameters, and of their gradients, only.

    `prepare` then moves the model to the device as well.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.tuning: Mapping[str, str] = {}
        """What was set for this host, and why; for the first line of output and for the run's record."""
        self.description = str(world)
        """Ranks and transport, in a few words."""
        self.is_over_nccl = False
        """Whether `all_reduce` of a tensor on the world's device takes NCCL."""
        self.flight_recorder: Recorder | None = None
        """Tells which collectives are not completed, where they return to Python before they are."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        note_waits(cls, {name: name for name in _COLLECTIVES}, counts=True)

    @abstractmethod
    def prepare(self, model: nn.Module, parameters: NamedParameters, config: RunConfig) -> Synchronizer:
        """Broadcast rank 0's weights and buffers; return what makes the gradients the mean over all ranks.

        Args:
            model: on the world's device.
            parameters: those of the model that require a gradient.
            config: compression and reduction are used here.

        Raises:
            ConfigError: the strategy cannot train this model with these settings.
        """

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call for a model that was prepared, which is the model itself as a rule."""
        return model

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks, in place; return it."""

    def sum_statistics(self, tensor: Tensor) -> Tensor:
        """Do what `all_reduce` does, for BatchNorm over the global batch: by this name a verdict tells it."""
        with waits(BATCH_NORM, tensor.numel(), counts=True):
            return self.all_reduce(tensor)

    def start_gradients(self, flat: Tensor, name: str) -> Callable[[], object]:
        """Begin to sum `flat`, which stands for gradients, over all ranks, in place; return what waits for the sum.

        Other methods may be called meanwhile.

        Args:
            flat: one-dimensional and contiguous, on the world's device. It stays as it is until then.
            name: the same for each message of its kind, and of no other; it is sent once at a time.
        """
        self.all_reduce(flat)
        return lambda: None

    def send_gradients(self, flat: Tensor, name: str) -> Tensor:
        """Do what `start_gradients` does, and wait for the sum; return it."""
        self.start_gradients(flat, name)()
        return flat

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

    def current(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what `prepare` has put into the model for this parameter, which may be the parameter itself."""
        return parameter

    def adopt(self, optimizer: Optimizer) -> None:
        """Give the optimizer rank 0's state, and the parameters that `prepare` has put into its model."""
        broadcast_optimizer_state(self, optimizer)

    def follow_model(self, model: nn.Module, synchronizer: Synchronizer, config: RunConfig) -> Synchronizer:
        """Return what synchronizes a model that was prepared: the synchronizer itself, or another in its place."""
        return synchronizer

    def follow_loader(self, loader: Loader) -> None:
        """Take notice of a loader that was made, before it is iterated over."""
        return

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Broadcast rank 0's buffers: BatchNorm's running statistics, which differ with each rank's batches."""
        self.broadcast_tensors(model.buffers())


def in_place(collective: Callable[[Tensor], object], tensor: Tensor) -> Tensor:
    """Run a collective on a tensor, which may be a slice: Gloo takes memory as it lies, and Horovod no strides."""
    dense = tensor.contiguous()
    collective(dense)
    return tensor if dense is tensor else tensor.copy_(dense)


def check_dense(model: nn.Module, taker: str) -> None:
    """Raise `ConfigError` for a module with sparse gradients; `taker` says what it is that takes dense ones."""
    for path, module in model.named_modules():
        if getattr(module, "sparse", False):
            raise ConfigError(f"{path} has sparse gradients, and {taker} dense ones; set sparse=False")


def broadcast_optimizer_state(strategy: Strategy, optimizer: Optimizer) -> None:
    """Broadcast rank 0's optimizer state, if it has any. A fresh optimizer stays untouched.

    Horovod's own `broadcast_optimizer_state` makes a fresh optimizer take a step on zero gradients to
    have a state to send, which lets weight decay shrink the weights and counts as Adam's first step.
    """
    here = optimizer.state_dict()
    state = strategy.broadcast_object(_on_cpu(here["state"]))
    if strategy.world.is_root:
        return
    if state:  # the groups are compared, and may hold what cannot be sent
        optimizer.load_state_dict({**here, "state": state})
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

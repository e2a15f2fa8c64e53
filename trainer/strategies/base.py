"""Strategy: how the ranks synchronize gradients, weights and values."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.config import TrainerConfig
from trainer.launch.world import World


class Strategy(ABC):
    """Gradient synchronization and collectives. It knows nothing of datasets or of the training loop.

    The constructor joins the job, so every rank has to make its strategy. All methods are collective: every rank
    calls them, in the same order.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.tuning: Mapping[str, str] = {}
        """What was set for this host, and why; for the first line of output and for the run's record."""
        self.description = str(world)
        """Ranks and transport, in a few words."""

    @abstractmethod
    def prepare(self, model: nn.Module, optimizer: Optimizer, config: TrainerConfig) -> tuple[nn.Module, Optimizer]:
        """Broadcast rank 0's weights and optimizer state, and make `step()` apply the mean gradient over all ranks.

        Args:
            model: on the world's device.
            optimizer: over parameters of `model`.
            config: compression, reduction and dynamic_graph are used here.

        Returns:
            The model to call and the optimizer to step; either may be a wrapper.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks, in place; return it."""

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

    def synchronize(self, optimizer: Optimizer) -> None:  # noqa: B027 (the identity is a valid default)
        """Wait until the gradients are the mean over all ranks, before they are read or changed."""

    def step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        """Apply gradients that `synchronize` has completed."""
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)

    def exchange_seconds(self) -> float | None:
        """Return the seconds spent in all-reduces of gradients since the last call; None where it cannot tell."""
        return None

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Broadcast rank 0's buffers: BatchNorm's running statistics, which differ with each rank's batches."""
        self.broadcast_tensors(model.buffers())


@runtime_checkable
class SupportsNoSync(Protocol):
    """Local accumulation of gradients, for strategies whose backward pass would all-reduce them."""

    def no_sync(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Context in which a backward pass adds to this rank's gradients without an all-reduce."""
        ...


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

"""What a strategy is: the way in which gradients meet."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.config import TrainerConfig
from trainer.world import World


class Strategy(ABC):
    """How ranks share weights, gradients and values. It knows nothing of datasets or of the loop.

    Making one joins the job: every rank makes its strategy, or the others wait. All its methods
    are collective: every rank calls them, in the same order.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.tuning: Mapping[str, str] = {}
        """What was set for this host, and why; for the line at the start and for the run's record."""
        self.description = str(world)
        """In a few words, who trains over what."""

    @abstractmethod
    def prepare(self, model: nn.Module, optimizer: Optimizer, config: TrainerConfig) -> tuple[nn.Module, Optimizer]:
        """Makes every rank start from rank 0's weights and optimizer state, and `step()` apply the mean gradient.

        Args:
            model: on the world's device.
            optimizer: over parameters of `model`.
            config: what concerns the exchange: compression, reduction, dynamic_graph.

        Returns:
            The model to call and the optimizer to step; either may be a wrapper around what came in.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over all ranks, in place; returns it."""

    @abstractmethod
    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Rank `root`'s value, on every rank. It travels pickled, inside the job only."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has called it."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the job. The strategy is of no use afterwards; a second call does nothing."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's `tensor`, in place on every rank; returns it."""
        if not self.world.is_root:
            tensor.zero_()
        return self.all_reduce(tensor)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks, on every rank."""
        return [self.broadcast_object(value, root=rank) for rank in range(self.world.size)]

    def synchronize(self, optimizer: Optimizer) -> None:  # noqa: B027 (the identity is a valid default)
        """Waits until the gradients are the mean over ranks: before one looks at them or changes them."""

    def step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        """Applies gradients that `synchronize` has completed."""
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)

    def exchange_seconds(self) -> float | None:
        """For how many seconds gradients have been on their way since the last call; None where it cannot tell."""
        return None

    def share_buffers(self, model: nn.Module) -> None:
        """Gives every rank rank 0's buffers: BatchNorm's running statistics, which see each rank's own batches."""
        for buffer in model.buffers():
            self.broadcast(buffer)


@runtime_checkable
class SkipsExchange(Protocol):
    """The ability to add gradients up locally, for strategies whose backward pass would exchange them."""

    def no_exchange(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Forward and backward passes in this context leave the gradients on this rank."""
        ...


def share_optimizer_state(strategy: Strategy, optimizer: Optimizer) -> None:
    """Gives every rank rank 0's optimizer state, if it has any: a fresh optimizer stays untouched.

    Horovod's own `broadcast_optimizer_state` makes a fresh optimizer take a step on zero gradients to
    have something to send, which lets weight decay shrink the weights and counts as Adam's first step.
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

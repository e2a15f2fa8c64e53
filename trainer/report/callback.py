"""Callbacks, which `Trainer` calls during a training, and the events that it passes to them.

Progress and the run's record are callbacks. A callback's `state_dict` is saved in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainer.cluster.world import World
from trainer.config import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class FitContext:
    """The fit that a callback belongs to."""

    world: World
    model: nn.Module
    """The model itself, never a wrapper."""
    optimizer: Optimizer
    epochs: int
    config: TrainerConfig
    strategy_name: str
    """Class of the strategy."""
    description: str
    """Ranks and transport, in a few words."""
    learning_rate: str
    """The learning-rate schedule, in words."""
    tuning: Mapping[str, str]
    """Settings that were tuned for this host, and why."""
    broadcast_object: Callable[[Any], Any]
    """Returns rank 0's value on every rank. Collective."""
    checkpoints: str = ""
    """The folder of the fit's checkpoints; empty without checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over a whole dataset, every sample counted once."""

    metrics: Mapping[str, float]
    """"loss" and every metric that the trainer was given, by name."""
    evaluated: int
    """Samples that were counted, over all ranks."""
    samples: int
    """Samples in the dataset; equal to `evaluated` if each was counted once."""


@dataclass(frozen=True, kw_only=True)
class ProgressEvent:
    """Progress within an epoch; sent a few times a second."""

    epoch: int
    """From 1."""
    epochs: int
    done: int
    """Samples of this epoch that all ranks together have trained on."""
    samples: int
    """Samples in an epoch."""
    loss: float
    """Mean loss since the epoch began, over this rank's samples."""
    seconds: float
    """Seconds since the epoch began."""


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """Loss and learning rate, every `log_every_updates` updates and after an epoch's last update."""

    update: int
    """Updates since the fit began, including this update."""
    epoch: int
    """From 1."""
    samples: int
    """Samples that all ranks together have trained on since the fit began."""
    loss: float
    """Mean since the epoch's last point, over this rank's samples."""
    learning_rate: float
    """Of this update, first parameter group."""


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """Results of an epoch, over all ranks."""

    epoch: int
    """From 1."""
    epochs: int
    train_loss: float
    """Mean over all samples of the epoch, each at the time it was trained on."""
    samples: int
    """Samples trained on, over all ranks."""
    seconds: float
    """Training only, without the evaluation."""
    learning_rate: float
    """Of the last update, first parameter group."""
    updates: int = 0
    """Updates since the fit began."""
    validation: Evaluation | None = None
    world_size: int = 1

    @property
    def samples_per_s(self) -> float:
        """Samples per second, of all ranks together."""
        return self.samples / max(self.seconds, 1e-9)


class Callback:
    """Base class of callbacks. Every rank calls every method; `context.world.is_root` tells rank 0."""

    def on_fit_start(self, context: FitContext) -> None:
        """Runs before the first step, after the consistency checks."""

    def on_progress(self, context: FitContext, event: ProgressEvent) -> None:
        """Runs a few times a second, not at the same step on every rank: nothing collective may happen here."""

    def on_update(self, context: FitContext, record: UpdateRecord) -> None:
        """Runs every `log_every_updates` updates and after an epoch's last update, the same on every rank."""

    def on_epoch_end(self, context: FitContext, record: EpochRecord) -> None:
        """Runs after an epoch and its evaluation, with the same record on every rank."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a checkpoint keeps of this callback: plain data and tensors. Every rank calls it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a checkpoint's state. Called before `on_fit_start`."""

    def on_fit_end(self, context: FitContext, records: list[EpochRecord]) -> None:
        """Runs after the last epoch."""

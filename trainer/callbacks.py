"""What happens beside the training: a small event hook, and what it is told.

Progress, the run's record and TensorBoard are callbacks. So is a checkpoint: `on_epoch_end` is the place for
it, and `Trainer.model` and `Trainer.optimizer` are what it has to keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over a whole dataset, every sample counted once."""

    metrics: Mapping[str, float]
    """"loss" and every metric that the trainer was given, by name."""
    evaluated: int
    """Samples that were counted, over all ranks."""
    samples: int
    """Samples in the dataset; the same number, or something is wrong."""


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """How far an epoch has come, a few times a second."""

    epoch: int
    """From 1."""
    epochs: int
    done: int
    """Samples of this epoch that all ranks together have gone through."""
    samples: int
    """Samples in an epoch."""
    loss: float
    """Mean loss since the epoch began, over this rank's samples."""
    seconds: float
    """Since the epoch began."""

    @property
    def samples_per_s(self) -> float:
        return self.done / max(self.seconds, 1e-9)


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """An epoch, as all ranks together saw it."""

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
    validation: Evaluation | None = None
    world_size: int = field(default=1)

    @property
    def samples_per_s(self) -> float:
        return self.samples / max(self.seconds, 1e-9)


class Callback:
    """Override what is of interest. Every rank calls every method; `trainer.world.is_root` tells rank 0."""

    def on_fit_start(self, trainer: Trainer, epochs: int) -> None:
        """Before the first step, after the ranks have agreed on model and settings."""

    def on_pulse(self, trainer: Trainer, pulse: Pulse) -> None:
        """A few times a second during an epoch; not at the same step on every rank, so nothing collective here."""

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        """After an epoch and its evaluation, with the same record on every rank."""

    def on_fit_end(self, trainer: Trainer, records: list[EpochRecord]) -> None:
        """After the last epoch."""

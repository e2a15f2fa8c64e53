"""Learning-rate schedule: scaled with the world size, warmed up, decayed.

The linear scaling rule and the gradual warm-up are from Goyal et al., "Accurate, Large Minibatch SGD:
Training ImageNet in 1 Hour" (2017), sections 2.1 and 2.2: with k times the batch take k times the learning
rate, and climb there from the single-worker rate over the first epochs. The half cosine is from Loshchilov
and Hutter, "SGDR" (2017), without restarts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer

from trainer.config import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Factor on the optimizer's learning rate, as a pure function of the update's number."""

    scale: float = 1.0
    """Factor after the warm-up: the global batch over the batch that the learning rate was chosen for."""
    warmup_updates: int = 0
    total_updates: int = 1
    decay: str = "none"
    """"none" keeps the scaled rate, "cosine" goes down along half a cosine, to 0 after the last update."""

    def factor(self, update: int) -> float:
        """Return the factor for update number `update`, from 0."""
        if update < self.warmup_updates:
            return 1.0 + (self.scale - 1.0) * (update + 1) / self.warmup_updates
        if self.decay == "none":
            return self.scale
        after = max(1, self.total_updates - self.warmup_updates)
        progress = min(1.0, (update - self.warmup_updates) / after)
        return self.scale * 0.5 * (1.0 + math.cos(math.pi * progress))


def make_schedule(config: TrainerConfig, *, world_size: int, updates_per_epoch: int, epochs: int) -> Schedule:
    """Return the schedule of a configuration.

    Adasum combines gradients so that the step needs no scaling with the world size (Maleki et al. 2020), so there is
    neither scale nor warm-up with it.
    """
    scaled = config.scale_lr and config.reduction != "adasum"
    scale = float(world_size * config.accumulate) if scaled else 1.0
    total = updates_per_epoch * epochs
    # Without scaling there is nothing to warm up to.
    warmup = min(total, round(config.warmup_epochs * updates_per_epoch)) if scale > 1.0 else 0
    return Schedule(scale=scale, warmup_updates=warmup, total_updates=total, decay=config.decay)


class LearningRate:
    """Applies a schedule to an optimizer's parameter groups, each relative to its own initial learning rate."""

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        self._groups = optimizer.param_groups
        self._base = [float(group["lr"]) for group in self._groups]
        self._schedule = schedule

    def set_for(self, update: int) -> None:
        factor = self._schedule.factor(update)
        for group, base in zip(self._groups, self._base, strict=True):
            group["lr"] = base * factor

    def restore(self) -> None:
        """Restore every group's initial learning rate, so that a second fit starts like the first."""
        for group, base in zip(self._groups, self._base, strict=True):
            group["lr"] = base

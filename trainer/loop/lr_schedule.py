"""Learning-rate schedule: scaled with the world size, warmed up, decayed.

The linear scaling rule and the gradual warm-up are from Goyal et al., "Accurate, Large Minibatch SGD:
Training ImageNet in 1 Hour" (2017), sections 2.1 and 2.2: with k times the batch take k times the learning
rate, and climb there from the single-worker rate over the first epochs. The half cosine is from Loshchilov
and Hutter, "SGDR" (2017), without restarts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainer.config import TrainerConfig
from trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Factor on the learning rate, a pure function of the update's number."""

    scale: float = 1.0
    """Factor after the warm-up: the global batch over the batch that the learning rate was chosen for."""
    start: float = 1.0
    """Factor that the warm-up climbs from."""
    warmup_updates: int = 0
    total_updates: int = 1
    decay: str = "none"
    """"none" keeps the scaled rate, "cosine" goes down along half a cosine, to 0 after the last update."""

    def factor(self, update: int) -> float:
        """Return the factor for update number `update`, from 0."""
        if update < self.warmup_updates:
            return self.start + (self.scale - self.start) * (update + 1) / self.warmup_updates
        if self.decay == "none":
            return self.scale
        after = max(1, self.total_updates - self.warmup_updates)
        progress = min(1.0, (update - self.warmup_updates) / after)
        return self.scale * 0.5 * (1.0 + math.cos(math.pi * progress))

    @cached_property
    def is_constant(self) -> bool:
        """Whether the learning rate stays what the user has set."""
        return self.scale == 1.0 and self.decay == "none" and (self.start == 1.0 or not self.warmup_updates)

    def describe(self, base: float) -> str:
        """Describe what happens to the learning rate `base`."""
        parts = [f"learning rate {base:g}"]
        if self.scale != 1.0:
            grown = "world size × accumulate" if self.start else "accumulate"
            parts[0] += f" × {self.scale:g} ({grown}) = {base * self.scale:g}"
        if self.warmup_updates:
            parts.append(f"warmed up from {base * self.start:g} over {self.warmup_updates} updates")
        parts.append("then a cosine to 0" if self.decay == "cosine" else "then constant")
        return ", ".join(parts)


def make_schedule(config: TrainerConfig, *, world_size: int, updates_per_epoch: int, epochs: int) -> Schedule:
    """Return the schedule of a configuration.

    With a global batch the learning rate is the same on any number of ranks. There is no single rank's to climb from,
    so it climbs from 0.
    """
    scaled, is_global = config.scale_lr, config.global_batch_size is not None
    scale = float(config.accumulate * (1 if is_global else world_size)) if scaled else 1.0
    start = 0.0 if scaled and is_global else 1.0
    total, decay = updates_per_epoch * epochs, config.decay or ("cosine" if scaled else "none")
    # Without scaling there is nothing to warm up to.
    warmup = min(total, round(config.warmup_epochs * updates_per_epoch)) if scale > start else 0
    return Schedule(scale=scale, start=start, warmup_updates=warmup, total_updates=total, decay=decay)


class LearningRate:
    """Applies a schedule to an optimizer's parameter groups, each relative to the learning rate of the script.

    A fit that goes on takes the script's as well: the schedule is a function of it, of the settings and of the update's
    number, so that it holds for another number of ranks. A rate that is neither scaled nor decayed may have been
    changed by a callback; it is the checkpoint's as long as the script's is the same.

    Raises:
        ConfigError: the user has made a scheduler for this optimizer, which would be overwritten.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        # PyTorch marks an optimizer's step so, to count its calls.
        self._has_scheduler = hasattr(optimizer.step, "_wrapped_by_lr_sched")
        if self._has_scheduler and not schedule.is_constant:
            raise ConfigError(
                "a learning rate scheduler was made for this optimizer, and Trainer's own schedule would overwrite it; "
                "hand it in (Trainer(…, lr_scheduler=…)), or set scale_lr to False"
            )
        self._optimizer = optimizer
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self._schedule = schedule

    def describe(self, update: int = 0) -> str:
        """Describe what happens to the learning rate from update number `update` on."""
        if self._schedule.is_constant:
            rate = float(self._optimizer.param_groups[0]["lr"])
            left = f"learning rate {rate:g}, left to the scheduler that was made for the optimizer"
            return left if self._has_scheduler else self._schedule.describe(rate)
        now = f"; now {self._base[0] * self._schedule.factor(update):g}" if update else ""
        return self._schedule.describe(self._base[0]) + now

    def before_update(self, update: int) -> None:
        """Set every group's learning rate for update number `update`, from 0."""
        if not self._schedule.is_constant:
            self._set(self._schedule.factor(update))

    def after_update(self) -> None:
        """Do nothing; a scheduler of the user's counts its steps here."""

    def after_epoch(self, loss: float) -> None:
        """Do nothing; a scheduler of the user's may count epochs."""

    def state_dict(self) -> dict[str, Any]:
        """Return the script's learning rates, where they are left alone. A schedule has no state."""
        return {"left alone": self._base if self._schedule.is_constant else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the script's learning rates again, which the optimizer's checkpoint has overwritten."""
        if not self._schedule.is_constant or state.get("left alone") != self._base:
            self._set(1.0)

    def restore(self) -> None:
        """Restore every group's initial learning rate, so that a second fit starts like the first."""
        if not self._schedule.is_constant:
            self._set(1.0)

    def _set(self, factor: float) -> None:
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            group["lr"] = base * factor


class UsersSchedule:
    """A scheduler of torch.optim.lr_scheduler instead of `LearningRate`: nothing else changes the learning rate.

    Args:
        scheduler: the user's scheduler, made for the optimizer; a checkpoint keeps its state.
        per: "update" or "epoch", after which the scheduler takes a step.

    Raises:
        ConfigError: `per` is neither, or a scheduler that watches a loss is to step per update.
    """

    def __init__(self, scheduler: LRScheduler, per: str) -> None:
        if per not in ("update", "epoch"):
            raise ConfigError(f"lr_scheduler_per is {per!r}; valid are update, epoch")
        if isinstance(scheduler, ReduceLROnPlateau) and per == "update":
            raise ConfigError("ReduceLROnPlateau watches the loss of epochs; set lr_scheduler_per to 'epoch'")
        self.scheduler, self._per = scheduler, per

    def describe(self, update: int = 0) -> str:
        """Describe what happens to the learning rate from update number `update` on."""
        now = f"; now {float(self.scheduler.optimizer.param_groups[0]['lr']):g}" if update else ""
        return f"learning rate by {type(self.scheduler).__name__}, one step per {self._per}; not scaled{now}"

    def before_update(self, update: int) -> None:
        """Do nothing: the scheduler has set the learning rate."""

    def after_update(self) -> None:
        if self._per == "update":
            self.scheduler.step()

    def after_epoch(self, loss: float) -> None:
        """Take a step after an epoch.

        Args:
            loss: of the validation, or of the training where there is none; for schedulers that watch it.
        """
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)
        elif self._per == "epoch":
            self.scheduler.step()

    def restore(self) -> None:
        """Do nothing: the schedule goes on in the next fit."""

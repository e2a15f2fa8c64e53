"""The learning rate: warm-up from the single-rank rate to the scaled one, then a decay."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.loop.lr_schedule import LearningRate, Schedule, UsersSchedule, make_schedule


def test_the_warm_up_climbs_in_equal_steps_and_ends_at_the_scaled_rate() -> None:
    schedule = Schedule(scale=4.0, warmup_updates=3, total_updates=10)
    assert [schedule.factor(update) for update in range(5)] == pytest.approx([2.0, 3.0, 4.0, 4.0, 4.0])


def test_the_cosine_starts_at_the_scaled_rate_is_half_of_it_midway_and_ends_at_zero() -> None:
    schedule = Schedule(scale=3.0, warmup_updates=2, total_updates=10, decay="cosine")
    assert schedule.factor(1) == 3.0
    assert schedule.factor(2) == 3.0
    assert schedule.factor(6) == pytest.approx(1.5)
    assert schedule.factor(9) == pytest.approx(1.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert schedule.factor(10) == pytest.approx(0.0, abs=1e-12)
    factors = [schedule.factor(update) for update in range(2, 11)]
    assert factors == sorted(factors, reverse=True)


@pytest.mark.parametrize(
    ("config", "world_size", "scale", "warmup"),
    [
        (TrainerConfig(), 4, 4.0, 10),
        (TrainerConfig(accumulate=3), 4, 12.0, 10),
        (TrainerConfig(warmup_epochs=0.25), 2, 2.0, 2),
        (TrainerConfig(warmup_epochs=0), 2, 2.0, 0),
        (TrainerConfig(warmup_epochs=99), 2, 2.0, 50),
        (TrainerConfig(scale_lr=False), 4, 1.0, 0),
        (TrainerConfig(global_batch_size=64), 4, 1.0, 10),
        (TrainerConfig(global_batch_size=64, accumulate=3), 1, 3.0, 10),
        (TrainerConfig(global_batch_size=64, scale_lr=False), 4, 1.0, 0),
    ],
)
def test_the_schedule_follows_the_settings(config: TrainerConfig, world_size: int, scale: float, warmup: int) -> None:
    schedule = make_schedule(config, world_size=world_size, updates_per_epoch=10, epochs=5)
    assert (schedule.scale, schedule.warmup_updates, schedule.total_updates) == (scale, warmup, 50)
    assert schedule.decay == ("cosine" if config.scale_lr else "none")
    assert schedule.is_constant is not config.scale_lr


def test_a_rate_that_is_not_scaled_may_decay_all_the_same() -> None:
    config = TrainerConfig(scale_lr=False, decay="cosine")
    assert make_schedule(config, world_size=2, updates_per_epoch=10, epochs=5).factor(49) < 0.01
    assert make_schedule(TrainerConfig(), world_size=1, updates_per_epoch=10, epochs=5) == Schedule(
        scale=1.0, warmup_updates=0, total_updates=50, decay="cosine"
    )


def test_every_group_keeps_its_own_base_rate_and_gets_it_back() -> None:
    tensors = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizer = SGD([{"params": tensors[:1], "lr": 0.1}, {"params": tensors[1:], "lr": 0.7}])
    rate = LearningRate(optimizer, Schedule(scale=4.0, warmup_updates=2))
    for update, factor in enumerate((2.5, 4.0, 4.0)):
        rate.before_update(update)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 * factor, 0.7 * factor])
    rate.restore()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.7]


def test_a_scheduler_that_was_not_handed_in_is_not_overwritten() -> None:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    for schedule in (Schedule(decay="cosine"), Schedule(start=0.0, warmup_updates=3)):
        with pytest.raises(ConfigError, match=r"hand it in \(Trainer\(…, lr_scheduler=…\)\)"):
            LearningRate(optimizer, schedule)
    left_alone = LearningRate(optimizer, Schedule(start=0.0))
    optimizer.step()
    scheduler.step()
    left_alone.before_update(1)
    left_alone.restore()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_scheduler_of_the_users_steps_per_update_or_per_epoch() -> None:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    for per, expected in (("update", (0.05, 0.05)), ("epoch", (0.05, 0.025))):
        schedule = UsersSchedule(scheduler, per)
        assert schedule.describe() == f"learning rate by StepLR, one step per {per}; not scaled"
        schedule.before_update(0)
        schedule.after_update()
        assert optimizer.param_groups[0]["lr"] == expected[0]
        schedule.after_epoch(1.0)
        assert optimizer.param_groups[0]["lr"] == expected[1]
    with pytest.raises(ConfigError, match="lr_scheduler_per is 'step'; valid are update, epoch"):
        UsersSchedule(scheduler, "step")


def test_a_scheduler_that_watches_the_loss_gets_it() -> None:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    with pytest.raises(ConfigError, match="set lr_scheduler_per to 'epoch'"):
        UsersSchedule(plateau, "update")
    schedule = UsersSchedule(plateau, "epoch")
    for loss, rate in ((1.0, 0.1), (0.5, 0.1), (0.5, 0.05)):
        schedule.after_epoch(loss)
        assert optimizer.param_groups[0]["lr"] == rate

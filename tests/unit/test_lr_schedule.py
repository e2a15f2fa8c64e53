"""The learning rate: warm-up from the single-rank rate to the scaled one, then a decay."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import SGD

from trainer.config import TrainerConfig
from trainer.lr_schedule import LearningRate, Schedule, make_schedule


def test_the_warm_up_climbs_in_equal_steps_and_ends_at_the_scaled_rate() -> None:
    schedule = Schedule(scale=4.0, warmup_updates=3, total_updates=10)
    assert [schedule.factor(update) for update in range(5)] == pytest.approx([2.0, 3.0, 4.0, 4.0, 4.0])


def test_without_warm_up_the_scaled_rate_holds_from_the_first_update() -> None:
    assert Schedule(scale=4.0, total_updates=10).factor(0) == 4.0


def test_the_cosine_starts_at_the_scaled_rate_is_half_of_it_midway_and_ends_at_zero() -> None:
    schedule = Schedule(scale=3.0, warmup_updates=2, total_updates=10, decay="cosine")
    assert schedule.factor(1) == 3.0
    assert schedule.factor(2) == 3.0
    assert schedule.factor(6) == pytest.approx(1.5)
    assert schedule.factor(9) == pytest.approx(1.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert schedule.factor(10) == pytest.approx(0.0, abs=1e-12)
    factors = [schedule.factor(update) for update in range(2, 11)]
    assert factors == sorted(factors, reverse=True)


def test_beyond_the_last_update_the_cosine_stays_at_zero() -> None:
    assert Schedule(total_updates=4, decay="cosine").factor(50) == pytest.approx(0.0, abs=1e-12)


def test_a_warm_up_over_all_updates_leaves_nothing_to_decay() -> None:
    schedule = Schedule(scale=2.0, warmup_updates=4, total_updates=4, decay="cosine")
    assert [schedule.factor(update) for update in range(4)] == [1.25, 1.5, 1.75, 2.0]


@pytest.mark.parametrize(
    ("config", "world_size", "scale", "warmup"),
    [
        (TrainerConfig(), 4, 4.0, 10),
        (TrainerConfig(accumulate=3), 4, 12.0, 10),
        (TrainerConfig(warmup_epochs=0.25), 2, 2.0, 2),
        (TrainerConfig(warmup_epochs=0), 2, 2.0, 0),
        (TrainerConfig(warmup_epochs=99), 2, 2.0, 50),
        (TrainerConfig(scale_lr=False), 4, 1.0, 0),
        (TrainerConfig(), 1, 1.0, 0),
        (TrainerConfig(reduction="adasum", accumulate=2), 4, 1.0, 0),
    ],
)
def test_the_schedule_follows_the_settings(config: TrainerConfig, world_size: int, scale: float, warmup: int) -> None:
    schedule = make_schedule(config, world_size=world_size, updates_per_epoch=10, epochs=5)
    assert (schedule.scale, schedule.warmup_updates, schedule.total_updates) == (scale, warmup, 50)
    assert schedule.decay == "cosine"


def test_every_group_keeps_its_own_base_rate_and_gets_it_back() -> None:
    tensors = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizer = SGD([{"params": tensors[:1], "lr": 0.1}, {"params": tensors[1:], "lr": 0.7}])
    rate = LearningRate(optimizer, Schedule(scale=4.0, warmup_updates=2))
    for update, factor in enumerate((2.5, 4.0, 4.0)):
        rate.set_for(update)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 * factor, 0.7 * factor])
    rate.restore()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.7]

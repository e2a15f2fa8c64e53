"""Intervals between checkpoints: the settings, and how often ranks agree."""

from __future__ import annotations

import pytest

from trainer import CheckpointConfig, ConfigError
from trainer.checkpoint.run.checkpoints import FlagReduction
from trainer.cluster.world import World
from trainer.config import settings_from
from trainer.strategies.single import SingleStrategy


def test_agreements_come_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("trainer.checkpoint.run.checkpoints.time.monotonic", lambda: now)
    ranks = FlagReduction(SingleStrategy(World()), 0)
    agreed = []
    for update in range(1, 400):
        now += 0.01 if update < 200 else 1.0
        if ranks.is_due(update):
            assert ranks.add_up(update, [True, False]) == [1, 0]
            agreed.append(update)
    assert agreed[:4] == pytest.approx([1, 51, 101, 151], abs=3)  # 0.5 s are 50 updates
    assert agreed[-3:] == [397, 398, 399]


def test_settings_that_there_are_not_or_that_exclude_each_other_are_named() -> None:
    with pytest.raises(ConfigError, match=r"run\.checkpoints has no setting 'every'; valid are folder, every_s"):
        settings_from(CheckpointConfig, "run.checkpoints", folder="a", every="30s")
    with pytest.raises(ConfigError, match="every_s and every_updates are given; checkpoints take one interval"):
        CheckpointConfig(folder="a", every_s=1, every_updates=1)

"""Where the time of a step goes: the arithmetic, and training in one process; `checks_timing` has it between ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scaling.epoch_timing import EpochTiming, RankTimes, StepTimes, summarize
from scaling.timed_strategy import timed
from torch.utils.data import TensorDataset

from trainer import Trainer, TrainerConfig, init
from trainer.cluster.world import World
from trainer.errors import ConfigError
from trainer.strategies import choose_strategy
from trainer.strategies.single import SingleStrategy


def rank(*rows: tuple[float, float, float], busy: float | None = None) -> RankTimes:
    """A rank's times, from (step, input, blocked) of each step."""
    steps = [
        StepTimes(step=step, input=put_in, blocked=blocked, window=0.002, count=10, is_update=blocked > 0)
        for step, put_in, blocked in rows
    ]
    return RankTimes(host="a", machine="m", steps=steps, exchange_seconds=busy)


def summary(*ranks: RankTimes) -> EpochTiming:
    return summarize(
        ranks, world_size=len(ranks), cores=2, threads=1, device="cpu", strategy="Single", gradient_bytes=1000,
        gradient_shapes=[[10, 25]], settings={}, workers=None, samples_in_epoch=60000,
    )  # fmt: skip


def test_the_slowest_rank_has_the_time_of_the_exchange_itself() -> None:
    timing = summary(rank((1.0, 0.1, 0.5), (1.0, 0.1, 0.2)), rank((1.0, 0.1, 0.1), (1.0, 0.1, 0.4)))
    assert timing.exchange == pytest.approx((0.1 + 0.2) / 2)
    assert timing.waiting == pytest.approx((0.4 + 0.0 + 0.0 + 0.2) / 4)
    assert timing.input + timing.compute + timing.exchange + timing.waiting == pytest.approx(1.0)
    assert (timing.samples, timing.steps, timing.updates, timing.seconds) == (40, 2, 2, 2.0)
    assert timing.own == pytest.approx([0.5, 0.6, 0.8, 0.9])
    many = summary(rank(*((1.0 + number, 0.0, 1.0) for number in range(400))))
    assert len(many.own) == 100
    assert many.own[0] == pytest.approx(1.5)


def test_steps_without_an_exchange_count_as_steps() -> None:
    timing = summary(rank((1.0, 0.0, 0.0), (1.5, 0.0, 0.5)))
    assert (timing.steps, timing.updates) == (2, 1)
    assert timing.exchange == pytest.approx(0.25)
    assert timing.compute == pytest.approx(1.0)
    assert timing.window == pytest.approx(0.004)  # of an update
    assert timing.own == pytest.approx([1.0])  # ranks synchronize once in an update


def test_an_exchange_that_no_rank_waits_for_is_hidden() -> None:
    assert summary(rank((1.0, 0.0, 0.2), busy=0.5)).hidden == pytest.approx(0.3)
    assert summary(rank((1.0, 0.0, 0.2), busy=0.1)).hidden == 0.0
    assert summary(rank((1.0, 0.0, 0.2))).hidden is None


Timed = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def time_training(tmp_path: Path) -> Timed:
    """Trains alone on 80 samples with the settings that it is given; returns what was written, epoch by epoch."""

    def train(*, steps: int | None = None, epochs: int = 1, **settings: Any) -> list[dict[str, Any]]:
        file = tmp_path / "timing.jsonl"
        model = torch.nn.Linear(2, 2)
        data = TensorDataset(torch.randn(80, 2), torch.zeros(80, dtype=torch.long))
        run = init(
            timed(SingleStrategy(World()), file, steps=steps),
            config=TrainerConfig(**{"device": "cpu", "batch_size": 10, **settings}),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, optimizer, torch.nn.functional.cross_entropy, run=run, output=None, progress=False)
        trainer.fit(data, epochs=epochs)
        return [json.loads(line) for line in file.read_text().splitlines()]

    return train


def test_an_epoch_ends_with_a_whole_update(time_training: Timed) -> None:
    first, second = time_training(steps=6, epochs=2, batch_size=2, accumulate=4)
    # Six steps are two updates of four, and five to warm up likewise.
    assert [(epoch["steps"], epoch["updates"]) for epoch in (first, second)] == [(8, 2), (8, 2)]
    assert first["workers"] == 0


def test_the_environment_can_choose_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_STRATEGY", "fsdp")
    assert choose_strategy("auto", World()) == "fsdp"
    assert choose_strategy("ddp", World()) == "ddp"
    monkeypatch.setenv("TRAINER_STRATEGY", "rings")
    with pytest.raises(ConfigError, match="strategy is 'rings'; valid are auto, single"):
        choose_strategy("auto", World())

"""A fit that goes on from a checkpoint: the same weights, records and files as one that was never interrupted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from tests.unit.blobs import blobs, network, weights
from trainer import Callback, CheckpointConfig, ConfigError, EpochRecord, FitContext, Trainer, TrainerConfig, accuracy
from trainer.checkpoint.disk.committed import find, load

UPDATES_PER_EPOCH, EPOCHS = 5, 3


class Interrupted(Exception):  # noqa: N818 (it is no error)
    """What ends a fit here."""


class Counter(Callback):
    """Counts the epochs that it has seen."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_epoch_end(self, context: FitContext, record: EpochRecord) -> None:
        self.epochs += 1

    def state_dict(self) -> Mapping[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epochs = state["epochs"]


class Fit:
    """A fit with dropout, a learning rate that changes with each update, a validation and a record.

    Args:
        steps: before it is interrupted, evaluations' included.
    """

    def __init__(
        self,
        folder: Path,
        steps: int = -1,
        *,
        output: Any = None,
        schedule: bool = False,
        precision: str = "fp32",
        **options: Any,
    ) -> None:
        self.counter, self._left = Counter(), steps
        model = network(dropout=0.3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.trainer = Trainer(
            model,
            optimizer,
            self._loss,
            strategy="single",
            config=TrainerConfig(device="cpu", batch_size=10, log_every_updates=1, accumulate=2, precision=precision),
            metrics={"accuracy": accuracy},
            lr_scheduler=StepLR(optimizer, 4) if schedule else None,
            callbacks=[self.counter],
            output=output,
            progress=False,
            checkpoint=CheckpointConfig(folder=folder, **{"every_updates": 1, **options}),
        )

    def run(self) -> list[EpochRecord]:
        try:
            return self.trainer.fit(blobs(100), blobs(30), epochs=EPOCHS)
        finally:
            assert self.trainer.run._checkpoints is not None
            self.trainer.run._checkpoints.close()

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self._left == 0:
            raise Interrupted
        self._left -= 1
        return F.cross_entropy(outputs, targets)


def interrupt(folder: Path, steps: int, **options: Any) -> None:
    with pytest.raises(Interrupted):
        Fit(folder, steps, **options).run()


def plain(records: list[EpochRecord]) -> list[EpochRecord]:
    return [replace(record, seconds=0.0) for record in records]


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("steps", [[3], [10, 0], [11], [14, 9, 5]], ids=str)
def test_it_ends_as_if_it_had_not_been_interrupted(steps: list[int], schedule: bool, tmp_path: Path) -> None:
    whole = Fit(tmp_path / "whole", schedule=schedule)
    expected = whole.run()
    for count in steps:
        interrupt(tmp_path / "parts", count, schedule=schedule)
    again = Fit(tmp_path / "parts", schedule=schedule)
    resumed = again.run()
    assert torch.equal(weights(again.trainer), weights(whole.trainer))
    assert plain(resumed) == plain(expected)
    assert again.counter.epochs == EPOCHS


def test_it_goes_on_with_the_loss_scale_of_fp16(tmp_path: Path) -> None:
    def fit(folder: str, steps: int = -1) -> tuple[Fit, GradScaler]:
        made = Fit(tmp_path / folder, steps, precision="fp16")
        scaler = made.trainer._scaler
        assert scaler is not None
        scaler.set_growth_interval(4)
        return made, scaler

    (whole, scaler), (parts, _) = fit("whole"), fit("parts", 17)
    whole.run()
    with pytest.raises(Interrupted):
        parts.run()
    again, scaler_again = fit("parts")
    again.run()
    assert torch.equal(weights(again.trainer), weights(whole.trainer))
    assert scaler_again.state_dict() == scaler.state_dict()
    assert scaler.get_scale() > 65536.0


def test_the_record_goes_on_in_its_folder(tmp_path: Path) -> None:
    output = tmp_path / "record"
    interrupt(tmp_path / "checkpoints", 9, output=output)  # with points after the newest checkpoint
    assert len(lines(output / "steps.jsonl")) == 4
    interrupt(tmp_path / "checkpoints", 9, output=output)
    Fit(tmp_path / "checkpoints", output=output).run()
    steps = [line["step"] for line in lines(output / "steps.jsonl")]
    assert sorted(set(steps)) == list(range(1, 16))
    assert steps[-1] == 15
    assert [line["epoch"] for line in lines(output / "epochs.jsonl")] == [1, 2, 3]
    assert len(lines(output / "starts.jsonl")) == 2


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(("best", "metric"), [("max", "accuracy"), ("min", "loss")])
def test_the_best_by_a_metric_is_kept(best: str, metric: str, tmp_path: Path) -> None:
    records = Fit(tmp_path, best=best, metric=metric, keep=1, every_updates=None, every_epochs=1).run()
    scores = [record.validation.metrics[metric] for record in records if record.validation]
    wanted = (min if best == "min" else max)(scores)
    assert wanted in [load(path).facts["score"] for path in find(tmp_path)]


def test_a_metric_that_there_is_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compared by 'f1'; valid are loss, accuracy"):
        Fit(tmp_path, best="max", metric="f1").trainer.fit(blobs(20), blobs(20), epochs=1)

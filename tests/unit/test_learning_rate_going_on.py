"""The learning rate of a fit that goes on: what is said of it is what is trained with, whatever was edited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR

from tests.unit.blobs import blobs, network
from trainer import Callback, CheckpointConfig, EpochRecord, FitContext, Trainer, TrainerConfig

UPDATES = 4
"""In an epoch."""


class Fit(Callback):
    """One start of a training of two groups; notes what it says, and trains with.

    Args:
        ranks: how many there are, as far as the learning rate and the batch go.
        factor: of the learning rate after each epoch, which a callback applies.
    """

    def __init__(
        self, folder: Path, *, lr: float = 0.05, decay: str = "none", ranks: int = 1, warmup: float = 0.0,
        factor: float = 1.0, weight_decay: float = 0.0, kind: str = "",
    ) -> None:  # fmt: skip
        self.folder, self.factor, self.said, self.rates = folder, factor, "", list[list[float]]()
        model = network()
        groups: list[dict[str, Any]] = [
            {"params": model[0].parameters()},
            {"params": model[3].parameters(), "lr": lr * 10},
        ]
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, weight_decay=weight_decay)
        self.schedule = _scheduler(kind, optimizer)
        self.trainer = Trainer(
            model,
            optimizer,
            F.cross_entropy,
            strategy="single",
            config=TrainerConfig(
                device="cpu", batch_size=10, accumulate=ranks, decay=decay, warmup_epochs=warmup, log_every_updates=1
            ),
            lr_scheduler=self.schedule,
            lr_scheduler_per="epoch" if kind == "plateau" else "update",
            callbacks=[self],
            output=None,
            progress=False,
            checkpoint=CheckpointConfig(folder=folder, every_updates=1),
        )
        optimizer.register_step_pre_hook(lambda one, *_: self.rates.append([group["lr"] for group in one.param_groups]))

    def run(self, epochs: int, stop_after: int = -1, samples: int = 10 * UPDATES) -> Fit:
        self._stop_after = stop_after
        try:
            self.records = self.trainer.fit(blobs(samples), epochs=epochs)
        except InterruptedError:
            pass
        finally:
            self.trainer.run._checkpoints.close()  # type: ignore[union-attr]
        return self

    def on_fit_start(self, context: FitContext) -> None:
        self.said = context.learning_rate

    def on_update(self, context: FitContext, record: Any) -> None:
        assert record.learning_rate == self.rates[-1][0]
        if len(self.rates) == self._stop_after:
            raise InterruptedError

    def on_epoch_end(self, context: FitContext, record: EpochRecord) -> None:
        assert record.learning_rate == self.rates[-1][0] if self.rates else record.learning_rate > 0
        for group in context.optimizer.param_groups:
            group["lr"] *= self.factor


def _scheduler(kind: str, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    if kind == "plateau":
        return ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=1e6)
    if kind == "one cycle":
        return OneCycleLR(optimizer, max_lr=[0.1, 1.0], total_steps=2 * UPDATES)
    return StepLR(optimizer, 3, gamma=0.5) if kind else None


@pytest.mark.parametrize(
    ("first", "then", "said", "rate"),
    [
        # More ranks, with a warm-up that is over.
        (
            {"ranks": 1},
            {"ranks": 2, "warmup": 1.0},
            "learning rate 0.05 × 2 (world size × accumulate) = 0.1, warmed up from 0.05 over 2 updates, "
            "then constant; now 0.1",
            0.1,
        ),
        # An edited rate.
        ({}, {"lr": 0.01}, "learning rate 0.01, then constant", 0.01),
        (
            {"decay": "cosine"},
            {"decay": "cosine", "lr": 0.1},
            "learning rate 0.1, then a cosine to 0; now 0.025",
            0.025,
        ),
        (
            {"kind": "plateau"},
            {"kind": "plateau"},
            "learning rate by ReduceLROnPlateau, one step per epoch; not scaled; now 0.0005",
            0.0005,
        ),
    ],
)
def test_what_is_said_is_what_trains(
    first: dict[str, Any], then: dict[str, Any], said: str, rate: float, tmp_path: Path
) -> None:
    Fit(tmp_path, **first).run(epochs=2)
    again = Fit(tmp_path, **then).run(epochs=3)
    assert again.said == said
    assert again.rates[0] == pytest.approx([rate, rate * 10])


def test_a_constant_rate_that_a_callback_has_changed_goes_on(tmp_path: Path) -> None:
    whole = Fit(tmp_path / "whole", factor=0.5).run(epochs=3)
    parts = Fit(tmp_path / "parts", factor=0.5).run(epochs=3, stop_after=UPDATES + 2)
    again = Fit(tmp_path / "parts", factor=0.5).run(epochs=3)
    assert parts.rates[: UPDATES + 1] + again.rates == whole.rates
    assert again.said == "learning rate 0.025, then constant"


def test_the_rate_of_a_scheduler_is_the_checkpoints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Fit(tmp_path, kind="step").run(epochs=1)
    again = Fit(tmp_path, kind="step", lr=0.4, weight_decay=0.5).run(epochs=2)
    err = capfd.readouterr().err
    assert (
        "from the checkpoint, not from the script: lr of group 0 = 0.05 (script: 0.4), weight_decay of group 0" in err
    )
    assert again.rates[0][0] == 0.025
    assert "now 0.025" in again.said
    assert again.trainer.optimizer.param_groups[1]["weight_decay"] == 0


def test_a_scheduler_that_ends_before_the_training_ends_it_with_torchs_error(tmp_path: Path) -> None:
    Fit(tmp_path, kind="one cycle").run(epochs=2)
    again = Fit(tmp_path, kind="one cycle")
    with pytest.raises(ValueError, match=r"Tried to step 9 times\. The specified number of total steps is 8"):
        again.run(epochs=3)
    assert len(Fit(tmp_path, kind="one cycle").run(epochs=2).records) == 2

"""The learning rate of a fit that goes on: what is said of it is what is trained with, whatever was edited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler, StepLR

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
    return StepLR(optimizer, 3, gamma=0.5) if kind else None


@pytest.mark.parametrize(
    ("first", "then", "said", "rate"),
    [
        # Fewer ranks, more ranks, with a warm-up that is over.
        ({"ranks": 2}, {}, "learning rate 0.05, then constant", 0.05),
        (
            {"ranks": 1},
            {"ranks": 2, "warmup": 1.0},
            "learning rate 0.05 × 2 (world size × accumulate) = 0.1, warmed up from 0.05 over 2 updates, "
            "then constant; now 0.1",
            0.1,
        ),
        # An edited decay.
        ({"decay": "cosine"}, {}, "learning rate 0.05, then constant", 0.05),
        (
            {"decay": "cosine"},
            {"decay": "cosine", "lr": 0.1},
            "learning rate 0.1, then a cosine to 0; now 0.025",
            0.025,
        ),
        (
            {"kind": "step"},
            {"kind": "step"},
            "learning rate by StepLR, one step per update; not scaled; now 0.0125",
            0.0125,
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


def test_a_difference_from_the_script_is_told_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Fit(tmp_path).run(epochs=1)
    capfd.readouterr()
    Fit(tmp_path).run(epochs=2)
    assert "differs" not in capfd.readouterr().err
    for epochs in (3, 4):  # at each start, as long as it is there
        edited = Fit(tmp_path, lr=0.01, weight_decay=0.5).run(epochs=epochs)
        (line,) = [line for line in capfd.readouterr().err.splitlines() if "differs" in line]
        assert ("lr of group 1 = 0.1 from the script (checkpoint: 0.5)" in line) == (epochs == 3)  # which counts
        assert "weight_decay of group 1 = 0 from the checkpoint (script: 0.5); see docs/surviving.md" in line
        assert edited.trainer.optimizer.param_groups[1]["weight_decay"] == 0

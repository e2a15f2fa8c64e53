"""What a loop of one's own is told when it goes on with other optimizers, schedulers and objects than before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer, lr_scheduler

from tests.unit.small_trainings import close_all, made, step
from tests.unit.test_loader import numbered
from trainer import Checkpoints, ConfigError, init
from trainer.checkpoint.run.contents import Contents

UPDATES = 3
"""In an epoch."""

Make = Callable[[Optimizer], Any]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_all()


class History:
    """Grows with the training: its names say nothing of what it is."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = dict(state)


class Other(History):
    """The same under another name."""


def train(
    folder: Path, schedule: Make, epochs: int, *, optimizer: Any = SGD, samples: int = 6, **options: Any
) -> tuple[list[float], Checkpoints]:
    """Go on to so many epochs; return the learning rate of each update."""
    run, model = init("single"), nn.Linear(2, 1)
    model, prepared = run.prepare(model, optimizer(model.parameters(), **{"lr": 0.1, "weight_decay": 0.0, **options}))
    scheduler = schedule(prepared)
    made.append(
        run.checkpoints(folder, every_epochs=1, state={"schedule": scheduler, "history": (history := History())})
    )
    loader, rates = run.loader(numbered(samples), 2), []
    for _ in run.epochs(epochs):
        for inputs, _ in loader:
            rates.append(prepared.param_groups[0]["lr"])
            history.values[str(len(history.values))] = torch.tensor(rates)
            step(run, model, prepared, inputs)
            if isinstance(scheduler, lr_scheduler.LRScheduler):
                scheduler.step(1.0) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()
    made[-1].close()
    return rates, made.pop()


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line]


def cosine(steps: int) -> Make:
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, steps)


def one_cycle(steps: int) -> Make:
    return lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=steps)


def plateau(optimizer: Optimizer) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


def by_function(steps: int) -> Make:
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)


def in_a_row(*kinds: type) -> Make:
    return lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [kind(optimizer, 4) for kind in kinds], milestones=[2]
    )


@pytest.mark.parametrize("optimizer", [SGD, Adam])
@pytest.mark.parametrize("schedule", [cosine(9), one_cycle(9), plateau, by_function(9)])
def test_an_unchanged_script_is_told_nothing_whatever_has_changed_in_training(
    schedule: Make, optimizer: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if optimizer is SGD else {}
    train(tmp_path, schedule, 1, optimizer=optimizer, **options)
    train(tmp_path, schedule, 3, optimizer=optimizer, **options)
    assert said(capfd) == []


def test_what_was_edited_and_what_counts_is_told_at_each_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before, _ = train(tmp_path, cosine(9), 1)
    for epochs in (2, 3):
        rates, _ = train(tmp_path, cosine(30), epochs, lr=torch.tensor(0.3), weight_decay=0.5)
        assert said(capfd) == [
            "trainer: WARNING: the script differs from the checkpoint; what counts: lr = 0.1 from the checkpoint "
            "(script: 0.3), weight_decay = 0 from the checkpoint (script: 0.5), T_max of state 'schedule' = 9 from "
            "the checkpoint (script: 30); see docs/surviving.md, Going on"
        ]
        before += rates
    expected, _ = train(tmp_path / "whole", cosine(9), 3)
    assert before == pytest.approx(expected)


def test_an_edited_rate_is_told_as_the_script_has_it_before_its_warm_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for epochs, rate in ((1, 0.1), (2, 0.3)):
        train(tmp_path, lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1), epochs, lr=rate)
    (line,) = said(capfd)
    assert "what counts: lr = 0.1 from the checkpoint (script: 0.3); see docs" in line


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        (
            cosine(9),
            lambda optimizer: lr_scheduler.StepLR(optimizer, 9),
            "is a CosineAnnealingLR there and a StepLR here",
        ),
        (
            in_a_row(lr_scheduler.StepLR, lr_scheduler.StepLR),
            in_a_row(lr_scheduler.StepLR, lr_scheduler.CosineAnnealingLR),
            "is a SequentialLR of StepLR and StepLR there and a SequentialLR of StepLR and CosineAnnealingLR here",
        ),
        (cosine(9), lambda _: {}, "'schedule' is a CosineAnnealingLR there and a dict here"),
        (lambda _: History(a=1), lambda _: Other(a=1), "'schedule' is a History there and a Other here"),
    ],
)
def test_another_object_under_a_name_is_refused(first: Make, then: Make, told: str, tmp_path: Path) -> None:
    train(tmp_path, first, 1)
    with pytest.raises(ConfigError) as error:
        train(tmp_path, then, 2)
    assert told in str(error.value)
    assert "give another folder, or restore what it was made with" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_object_that_cannot_load_its_state_is_one_line(tmp_path: Path) -> None:
    train(tmp_path, lambda _: nn.BatchNorm1d(2), 1)
    with pytest.raises(ConfigError, match=r"'schedule' of the checkpoint does not fit this BatchNorm1d: .*weight"):
        train(tmp_path, lambda _: nn.BatchNorm1d(2, affine=False), 2)


def test_a_function_of_the_step_fits_more_epochs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, by_function(UPDATES), 1)
    rates, _ = train(tmp_path, by_function(2 * UPDATES), 2)
    assert rates[1:] == pytest.approx([0.1 * 2 / 6, 0.1 * 1 / 6])
    assert said(capfd) == []


def test_another_dataset_says_what_to_do(tmp_path: Path) -> None:
    train(tmp_path, cosine(9), 1)
    with pytest.raises(
        ConfigError,
        match="holds for samples 6, and here it is 8; restore that to go on, or begin in another folder, with the",
    ):
        train(tmp_path, cosine(9), 2, samples=8)


def test_a_checkpoint_without_settings_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As versions before have written them."""
    state = Contents.state
    monkeypatch.setattr(Contents, "state", lambda contents: without(state(contents), "settings", "kinds"))
    train(tmp_path, cosine(9), 1)
    monkeypatch.undo()
    rates, _ = train(tmp_path, cosine(9), 2, lr=0.3)
    assert rates[0] == pytest.approx(0.075)


def without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}

"""What a checkpoint keeps of a run: how it is compared with the script, and how it is given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer, lr_scheduler

from tests.unit.small_trainings import close_all, made, step
from tests.unit.test_loader import numbered
from trainer import ConfigError, World, init
from trainer.checkpoint.run import contents as contents_module
from trainer.checkpoint.run.contents import Contents
from trainer.strategies.gradients import Synchronizer


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_all()


class Noted(Synchronizer):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def average_weights(self, optimizers: Any = ()) -> None:
        self.calls.append("average_weights")

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state")
        return {"kind": "noted"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls.append(dict(state))


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def two_groups(parameters: Any) -> Optimizer:
    return sgd([{"params": [parameter]} for parameter in parameters])


def make(model: nn.Module | None = None, optimizer: Callable[[Any], Any] = sgd, **objects: Any) -> tuple[Contents, Any]:
    model = model or nn.Linear(2, 3)
    prepared: Any = SimpleNamespace(models={model: Noted()}, optimizers=[optimizer(model.parameters())])
    return Contents(prepared, objects), prepared


def resume(contents: Contents, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    position = {"epoch": 0, "updates": 3, "loaders": [], "saved_in": None, "random": [None]}
    monkeypatch.setattr(contents_module, "read_state", lambda *_, **__: saved | position)
    checkpoint: Any = SimpleNamespace(path=Path("a"), facts={"written": "today"})
    contents.resume(checkpoint, SimpleNamespace(shards=False, world=World()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ({"model": nn.Linear(2, 3, bias=False)}, ["it lacks bias", "has [1] parameters per group there and [2] here"]),
        (
            {"model": nn.Sequential(nn.Linear(2, 3))},
            ["it lacks weight and 1 more", "it has 0.weight and 1 more, which the model does not have"],
        ),
        ({"model": nn.Linear(2, 4)}, ["weight has shape (4, 2) there and (3, 2) here", "bias has shape (4,) there"]),
        ({"model": nn.Linear(2, 3).double()}, ["weight is torch.float64 there and torch.float32 here", "bias is"]),
        ({"optimizer": Adam}, ["the optimizer is a Adam there and a SGD here"]),
        ({"optimizer": two_groups}, ["the optimizer has [1, 1] parameters per group there and [2] here"]),
        ({"totals": {}}, ["it has a state 'totals'"]),
    ],
)
def test_what_keeps_a_checkpoint_from_being_loaded_is_told(
    there: dict[str, Any], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="checkpoint a does not fit this run") as error:
        resume(make()[0], make(**there)[0].state(), monkeypatch)
    assert all(part in str(error.value) for part in told)
    assert str(error.value).count(";") == len(told)
    assert "\n" not in str(error.value)


def test_another_number_of_models_or_optimizers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = make()[0].state()
    saved["models"] *= 2
    saved["optimizers"] = []
    with pytest.raises(ConfigError, match="2 models, and 1 were prepared; it has 0 optimizers, and 1 were prepared"):
        resume(make()[0], saved, monkeypatch)


def test_everything_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = {"seen": 1, "since": 2}
    contents, prepared = make(totals=totals, layer=nn.Linear(1, 1))
    saved = contents.state()
    assert next(iter(prepared.models.values())).calls == ["average_weights", "state"]
    saved["objects"]["totals"] = {"seen": 5}
    other, there = make(totals=totals, layer=nn.Linear(1, 1))
    resume(other, saved, monkeypatch)
    assert totals == {"seen": 5}  # what the checkpoint does not have is gone
    assert torch.equal(next(iter(there.models)).weight, next(iter(prepared.models)).weight)
    assert torch.equal(other.objects["layer"].weight, contents.objects["layer"].weight)
    assert next(iter(there.models.values())).calls[-1] == {"kind": "noted"}


def test_what_was_prepared_and_what_cannot_be_loaded_is_refused() -> None:
    _, prepared = make()
    for held in (*prepared.models, *prepared.optimizers):
        with pytest.raises(ConfigError, match="state 'mine' was prepared, and is kept by itself; leave it out"):
            Contents(prepared, {"mine": held})
    with pytest.raises(ConfigError, match="state 'mine' is a SimpleNamespace; valid are a dict, and objects with"):
        Contents(prepared, {"mine": SimpleNamespace(state_dict=dict)})


Make = Callable[[Optimizer], Any]


def train(folder: Path, schedule: Make, epochs: int, *, samples: int = 6, **options: Any) -> list[float]:
    """Go on to so many epochs of three updates; return the learning rate of each update."""
    run, model = init("single"), nn.Linear(2, 1)
    model, optimizer = run.prepare(model, SGD(model.parameters(), **{"lr": 0.1, "weight_decay": 0.0, **options}))
    scheduler = schedule(optimizer)
    made.append(run.checkpoints(folder, every_epochs=1, state={"schedule": scheduler}))
    loader, rates = run.loader(numbered(samples), 2), []
    for _ in run.epochs(epochs):
        for inputs, _ in loader:
            rates.append(float(optimizer.param_groups[0]["lr"]))
            step(run, model, optimizer, inputs)
            if isinstance(scheduler, lr_scheduler.LRScheduler):
                scheduler.step()
    made.pop().close()
    return rates


def cosine(optimizer: Optimizer) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, 9)


def one_cycle(optimizer: Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=9)


def by_function(optimizer: Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 9)


def in_a_row(*kinds: type) -> Make:
    return lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [kind(optimizer, 4) for kind in kinds], milestones=[2]
    )


@pytest.mark.parametrize("schedule", [cosine, one_cycle, by_function])
def test_an_unchanged_script_is_told_nothing_whatever_has_changed_in_training(
    schedule: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for epochs in (1, 3):
        train(tmp_path, schedule, epochs, momentum=0.9)
    assert "not from the script" not in capfd.readouterr().err


def test_what_counts_of_an_edited_script_is_told_at_each_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rates = train(tmp_path, cosine, 1)
    for epochs in (2, 3):
        rates += train(tmp_path, cosine, epochs, lr=0.3, weight_decay=0.5)
        told = "from the checkpoint, not from the script: lr = 0.1 (script: 0.3), weight_decay = 0.0 (script: 0.5)\n"
        assert told in capfd.readouterr().err
    assert rates == pytest.approx(train(tmp_path / "whole", cosine, 3))


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        (cosine, lambda one: lr_scheduler.StepLR(one, 9), "is a CosineAnnealingLR there and a StepLR here"),
        (
            in_a_row(lr_scheduler.StepLR, lr_scheduler.StepLR),
            in_a_row(lr_scheduler.StepLR, lr_scheduler.CosineAnnealingLR),
            "is a SequentialLR of StepLR and StepLR there and a SequentialLR of StepLR and CosineAnnealingLR here",
        ),
        (cosine, lambda _: {}, "'schedule' is a CosineAnnealingLR there and a dict here"),
        (
            lambda _: nn.BatchNorm1d(2),
            lambda _: nn.BatchNorm1d(2, affine=False),
            "'schedule' of the checkpoint does not fit this BatchNorm1d: ",
        ),
    ],
)
def test_another_object_under_a_name_is_refused_in_a_line(first: Make, then: Make, told: str, tmp_path: Path) -> None:
    train(tmp_path, first, 1)
    with pytest.raises(ConfigError) as error:
        train(tmp_path, then, 2)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_another_dataset_says_what_to_do(tmp_path: Path) -> None:
    train(tmp_path, cosine, 1)
    with pytest.raises(ConfigError, match="for samples 6, and here it is 8; restore that to go on, or begin in anot"):
        train(tmp_path, cosine, 2, samples=8)

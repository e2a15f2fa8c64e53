"""What a checkpoint keeps of a run: how it is compared, and how it is given back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainer import ConfigError, World
from trainer.checkpoint.run import contents as contents_module
from trainer.checkpoint.run.contents import Contents
from trainer.strategies.gradients import Synchronizer


class Noted(Synchronizer):
    """Has a state of its own, and notes what it is asked for."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls
        self.loaded: list[dict[str, Any]] = []

    def average_weights(self, optimizers: Any = ()) -> None:
        self.calls.append(f"average_weights {len(optimizers)}")

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state")
        return {"kind": "noted"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded.append(dict(state))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make(model: nn.Module | None = None, optimizer: Callable[[Any], Any] = sgd, **objects: Any) -> tuple[Contents, Any]:
    model = model or nn.Linear(2, 3)
    calls: list[str] = []
    prepared: Any = SimpleNamespace(
        models={model: Noted(calls)}, optimizers=[optimizer(model.parameters())], calls=calls
    )
    return Contents(prepared, objects), prepared


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    return sgd([{"params": [parameter]} for parameter in parameters])


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ({}, []),
        ({"model": nn.Linear(2, 3, bias=False)}, ["it lacks bias", "has [1] parameters per group there and [2] here"]),
        (
            {"model": nn.Sequential(nn.Linear(2, 3))},
            ["it lacks weight and 1 more", "it has 0.weight and 1 more, which the model does not have"],
        ),
        ({"model": nn.Linear(2, 4)}, ["weight has shape (4, 2) there and (3, 2) here", "bias has shape (4,) there"]),
        ({"model": nn.Linear(2, 3).double()}, ["weight is torch.float64 there and torch.float32 here", "bias is"]),
        ({"optimizer": torch.optim.Adam}, ["the optimizer is a Adam there and a SGD here"]),
        ({"optimizer": two_groups}, ["the optimizer has [1, 1] parameters per group there and [2] here"]),
        ({"scaler": torch.amp.GradScaler("cpu")}, ["it has a state 'scaler'"]),
        ({"totals": {}}, ["it has a state 'totals'"]),
    ],
)
def test_what_keeps_a_checkpoint_from_being_loaded_is_told(there: dict[str, Any], told: list[str]) -> None:
    problems = make()[0].differences(make(**there)[0].state())
    assert len(problems) == len(told)
    assert all(part in problem for part, problem in zip(told, problems, strict=True)), problems


def test_what_a_checkpoint_is_without_is_told() -> None:
    saved = make()[0].state()
    contents = make(scaler=torch.amp.GradScaler("cpu"), totals={})[0]
    assert contents.differences(saved) == ["it has no state 'scaler'", "it has no state 'totals'"]
    saved["models"] *= 2
    saved["optimizers"] = []
    problems = make()[0].differences(saved)
    assert problems == ["it has 2 models, and 1 were prepared", "it has 0 optimizers, and 1 were prepared"]


def test_weights_are_averaged_before_the_state_is_read() -> None:
    contents, prepared = make()
    contents.state()
    assert prepared.calls == ["average_weights 1", "state"]


@pytest.mark.parametrize("has_scaler", [True, False])
def test_the_loss_scale_of_an_older_checkpoint_is_that_of_the_state_scaler(
    monkeypatch: pytest.MonkeyPatch, has_scaler: bool
) -> None:
    saved = make()[0].state()
    position = {"epoch": 0, "updates": 3, "loaders": [], "saved_in": None, "random": [None, None]}
    saved |= {**position, "scaler": {**torch.amp.GradScaler("cpu").state_dict(), "scale": 8.0}}
    monkeypatch.setattr(contents_module, "read_state", lambda *_, **__: saved)
    checkpoint: Any = SimpleNamespace(path=Path("a"), facts={"complete": False, "written": "today"})
    strategy: Any = SimpleNamespace(shards=False, world=World())
    scaler = torch.amp.GradScaler("cpu")
    contents, _ = make(scaler=scaler) if has_scaler else make()
    if not has_scaler:
        with pytest.raises(ConfigError, match="checkpoint a does not fit this run: it has a state 'scaler'; give"):
            contents.resume(checkpoint, strategy)
        return
    contents.resume(checkpoint, strategy)
    assert scaler.get_scale() == 8.0


def test_everything_is_given_back() -> None:
    totals = {"seen": 1, "since": 2}
    contents, prepared = make(totals=totals, layer=nn.Linear(1, 1))
    saved = contents.state()
    saved["objects"]["totals"] = {"seen": 5}
    other, there = make(totals=totals, layer=nn.Linear(1, 1))
    other.load(saved)
    assert totals == {"seen": 5}  # what the checkpoint does not have is gone
    assert torch.equal(next(iter(there.models)).weight, next(iter(prepared.models)).weight)
    assert torch.equal(other.objects["layer"].weight, contents.objects["layer"].weight)
    (synchronizer,) = there.models.values()
    del saved["synchronizers"]  # as in an older checkpoint
    other.load(saved)
    assert synchronizer.loaded == [{"kind": "noted"}, {}]


def test_what_was_prepared_and_what_cannot_be_loaded_is_refused() -> None:
    _, prepared = make()
    for held in (*prepared.models, *prepared.optimizers):
        with pytest.raises(ConfigError, match="state 'mine' was prepared, and is kept by itself; leave it out"):
            Contents(prepared, {"mine": held})
    with pytest.raises(ConfigError, match="state 'mine' is a SimpleNamespace; valid are a dict, and objects with"):
        Contents(prepared, {"mine": SimpleNamespace(state_dict=dict)})

"""Progress and record of a loop of one's own: what is shown, what is written, and only on rank 0."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit.test_run import OfTwo
from trainer import ConfigError, InMemory, Run, TrainerError, World, init
from trainer.report import loop_report


class Shown:
    """Stands for the display."""

    shown: list[tuple[Any, ...]] = []  # noqa: RUF012 (of all displays in a test)

    def __init__(self, every_s: float) -> None:
        assert every_s == 10

    def show(self, head: str, done: int, samples: int, details: Sequence[str], unit: str) -> None:
        self.shown.append((head, done, samples, unit, *details))

    def clear(self) -> None:
        self.shown.append(("cleared",))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    monkeypatch.setattr(loop_report, "Display", Shown)
    monkeypatch.setattr(Shown, "shown", [])
    return Shown.shown


def data(samples: int) -> InMemory:
    return InMemory(torch.arange(float(samples)).unsqueeze(1), torch.zeros(samples))


def lines(path: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in entry.items() if name != "seconds"} for entry in entries]


def of_rank_1() -> Run:
    return init(OfTwo(World(rank=1, size=2)))


def test_progress_yields_the_loaders_batches_and_shows_epoch_samples_and_values(shown: list[Any]) -> None:
    run = init("single")
    loader, same = (run.loader(data(50), 10, shuffle=False) for _ in range(2))
    for _ in run.epochs(2):
        batches = [inputs.tolist() for inputs, _ in run.progress(loader)]
        assert batches == [inputs.tolist() for inputs, _ in same]
        run.log({"loss": 0.5}, step=1)
    assert shown == [
        *(("epoch 1/2", done, 50, "samples") for done in range(0, 50, 10)),
        ("cleared",),
        *(("epoch 2/2", done, 50, "samples", "loss 0.5") for done in range(0, 50, 10)),
        ("cleared",),
    ]


@pytest.mark.filterwarnings("error")
def test_a_record_has_settings_and_a_line_for_each_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    run, model = init("single", accumulate=2), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    run.prepare(model, optimizer)  # which does not make two of it
    folder = run.record(tmp_path / "run", settings={"hidden": 64})
    assert folder == tmp_path / "run"
    run.log({"train/loss": torch.tensor(0.25, requires_grad=True), "lr": 0.1}, step=1)
    run.log({"validation/accuracy": torch.tensor([1])}, step=2)
    assert lines(folder / "steps.jsonl") == [
        {"step": 1, "train/loss": 0.25, "lr": 0.1},
        {"step": 2, "validation/accuracy": 1.0},
    ]
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["settings"] == {"hidden": 64}
    assert settings["config"]["accumulate"] == 2
    assert settings["command"] == ["train.py", "--lr", "0.1"]
    assert [(entry["class"], entry["groups"][0]["lr"]) for entry in settings["optimizers"]] == [("SGD", 0.1)]
    assert settings["world"]["size"] == 1
    assert {"description", "tuning", "versions", "started"} < set(settings)
    with pytest.raises(TrainerError, match="already holds a run"):
        run.record(folder)
    # A later start finds the folder with a run, and does not know yet whether it goes on with that.
    with pytest.raises(ConfigError, match=r"run\.record was called before run\.checkpoints"):
        run.checkpoints(tmp_path / "checkpoints")


def test_another_rank_shows_and_writes_nothing_and_waits_for_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: list[Any]
) -> None:
    run = of_rank_1()
    monkeypatch.setattr(run.strategy, "all_gather_object", lambda value: [value])
    loader = run.loader(data(4), 1)
    monkeypatch.setattr(run.strategy, "broadcast_object", lambda value, root=0: ("", "runs/of-rank-0"))
    assert run.record(tmp_path / "run") == Path("runs/of-rank-0")
    run.log({"loss": torch.zeros(3)}, step=1)  # would be refused on rank 0
    assert [len(batch[0]) for batch in run.progress(loader)] == [1, 1]
    assert list(tmp_path.iterdir()) == []
    assert shown == []


def test_values_that_are_no_numbers_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    run = init("single")
    run.record(tmp_path)
    with pytest.raises(ConfigError, match=r"^run\.log takes numbers, and loss is a tensor of shape \(3,\)$"):
        run.log({"lr": 0.1, "loss": torch.zeros(3)}, step=1)
    with pytest.raises(ConfigError, match=r"^run\.log takes numbers, and note is 'high'$"):
        run.log({"note": "high"}, step=1)  # type: ignore[dict-item]
    assert not (tmp_path / "steps.jsonl").exists()


def test_values_without_a_place_are_refused_on_the_rank_that_would_write_them() -> None:
    with pytest.raises(ConfigError, match=r"run\.log has nowhere to write: call run\.record\(\) .*log_to"):
        init("single").log({"loss": 0.5}, step=1)
    of_rank_1().log({"loss": 0.5}, step=1)  # its script has called log_to on rank 0 alone, perhaps


def test_functions_get_the_values_as_numbers_and_their_step(tmp_path: Path) -> None:
    run = init("single")
    calls: list[tuple[int, Any]] = []
    run.log_to(lambda values, step: calls.append((step, values)))
    run.log({"loss": torch.tensor(0.5, requires_grad=True), "lr": 0.1}, step=np.int64(50))  # type: ignore[arg-type]
    assert calls == [(50, {"loss": 0.5, "lr": 0.1})]
    assert [type(value) for value in (calls[0][0], *calls[0][1].values())] == [int, float, float]

    run.record(tmp_path)
    run.log_to(lambda values, step: calls.append((step, "of the second")))
    run.log({"loss": 0.25}, step=100)
    assert calls[1:] == [(100, {"loss": 0.25}), (100, "of the second")]
    assert [line["loss"] for line in lines(tmp_path / "steps.jsonl")] == [0.25]


def test_a_line_is_json_and_keeps_its_own_names(tmp_path: Path) -> None:
    run = init("single")
    run.record(tmp_path / "run", settings=Namespace(lr=0.1))
    with pytest.raises(ConfigError, match=r"run\.log writes 'step' itself"):
        run.log({"step": 3.0}, step=2)
    run.log({"loss": float("nan")}, step=np.int64(2))  # type: ignore[arg-type]  # as a loop over numpy's numbers has it
    assert lines(tmp_path / "run" / "steps.jsonl") == [{"step": 2, "loss": None}]
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["settings"] == {"lr": 0.1}

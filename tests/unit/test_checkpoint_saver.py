"""The saver's commits: one snapshot at a time, however often it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import CheckpointConfig, TrainerError, World
from trainer.checkpoint.disk.committed import find
from trainer.checkpoint.disk.state_files import read_state
from trainer.checkpoint.run.saver import Saver
from trainer.checkpoint.run.storage import Storage
from trainer.strategies.single import SingleStrategy


def make(folder: Path) -> Saver:
    strategy = SingleStrategy(World())
    return Saver(CheckpointConfig(folder=folder, keep=2), Storage(folder, strategy), strategy, 1, {})


def save(saver: Saver, **state: Any) -> None:
    saver.save({"epoch": 0, "updates": 3, "loaders": [], **state})


def test_what_is_committed_already_is_no_error_when_it_is_asked_for_again(tmp_path: Path) -> None:
    saver = make(tmp_path)
    for _ in range(2):
        save(saver, weight=torch.ones(2))
        saver.wait()
        assert saver.error is None
        saver.close()
        saver.error = TrainerError("another host could not write it")
        assert saver.take_problem()
    (path,) = find(tmp_path)
    assert read_state(path)["weight"].tolist() == [1.0, 1.0]
    assert len(saver.seconds) == 1


def test_what_has_changed_at_the_same_place_is_saved_where_it_is_asked_for(tmp_path: Path) -> None:
    saver = make(tmp_path)
    for value, again in ((1.0, False), (2.0, False), (3.0, True)):
        saver.save({"epoch": 0, "updates": 3, "loaders": [], "weight": torch.tensor(value)}, again=again)
        saver.wait()
    newest, older = find(tmp_path)
    assert [float(read_state(path)["weight"]) for path in (newest, older)] == [3.0, 1.0]
    saver.close()


def test_an_old_one_that_cannot_be_removed_takes_nothing_from_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise TrainerError("old checkpoints cannot be removed: Directory not empty")

    monkeypatch.setattr("trainer.checkpoint.run.saver.prune", refuse)
    saver = make(tmp_path)
    for updates in (3, 4):
        save(saver, updates=updates)
        saver.wait()
    assert saver.take_problem() == ""
    assert len(find(tmp_path)) == 2
    assert capsys.readouterr().err.count("cannot be removed: Directory not empty; the new one is saved") == 1
    saver.close()


def test_an_error_that_is_not_ours_is_told_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = make(tmp_path)

    def fail(*_: object) -> None:
        raise TypeError

    monkeypatch.setattr(torch, "save", fail)
    save(saver)
    saver.wait()
    assert isinstance(saver.error, TrainerError)
    assert "the checkpoint cannot be written: TypeError" in str(saver.error)
    assert find(tmp_path) == []
    saver.close()

"""The saver's commits: one snapshot at a time, whoever waits for it, and however often it is asked for."""

from __future__ import annotations

import threading
import time
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


def test_two_threads_may_wait_for_the_same_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = make(tmp_path)
    monkeypatch.setattr(saver, "_commit", lambda *_: time.sleep(0.2))
    save(saver)
    waited: list[bool] = []

    def wait() -> None:
        saver.wait()
        waited.append(not saver.is_busy)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert waited == [True] * 4
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

"""The writer: one snapshot at a time, whoever waits for it, and however often it is asked for."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from trainer.checkpoint.disk.committed import find
from trainer.checkpoint.disk.state_files import STATE, read_state
from trainer.checkpoint.run.writer import Writer


def make(folder: Path) -> Writer:
    return Writer(folder, keep=2, damaged=[], kept=[])


def test_what_is_committed_already_is_no_error_when_it_is_asked_for_again(tmp_path: Path) -> None:
    writer = make(tmp_path)
    for _ in range(2):  # another host could not write it
        writer.start((1, 0, 3), {STATE: {"weight": torch.ones(2)}}, {}, None)
        writer.wait()
        assert writer.error is None
        writer.close()
    (path,) = find(tmp_path)
    assert read_state(path)["weight"].tolist() == [1.0, 1.0]


def test_two_threads_may_wait_for_the_same_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = make(tmp_path)
    monkeypatch.setattr(writer, "commit", lambda *_: time.sleep(0.2))
    writer.start((1, 0, 3), {}, {}, None)
    waited: list[bool] = []

    def wait() -> None:
        writer.wait()
        waited.append(not writer.is_busy)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert waited == [True] * 4
    writer.close()


def test_an_error_that_is_not_ours_is_told_as_well(tmp_path: Path) -> None:
    writer = make(tmp_path)
    writer.commit((1, 0, 3), {STATE: {"value": threading.Lock()}}, {}, None)
    assert "the checkpoint cannot be written: TypeError" in str(writer.error)
    assert find(tmp_path) == []

"""Where results can be written: what stands behind an error that a file cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer import files
from trainer.errors import DataError, TrainerError

REFUSED = (
    PermissionError(13, "Permission denied", "model.pt"),
    OSError(30, "Read-only file system", "model.pt"),
    TrainerError("output folder results cannot be written: Permission denied"),
    RuntimeError("open file failed with strerror: Permission denied"),  # of torch.save
)
OTHERS = (
    FileNotFoundError(2, "No such file or directory", "model.pt"),
    DataError("data/MNIST/raw cannot be read: Permission denied"),
    MemoryError(),
    PermissionError(13, "Permission denied", __file__),  # which is there, and so was to be read
    RuntimeError("b: Permission denied (publickey)"),
    PermissionError("Permission denied"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose code belongs to another user; root, who may run the tests, could write all of it."""
    for name in ("examples", "runs", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "runs.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name in ("runs", "data", "runs.txt"))
    return tmp_path


@pytest.mark.parametrize("error", REFUSED, ids=lambda error: type(error).__name__)
def test_a_refused_file_is_followed_by_the_folders_that_take_one(folder: Path, error: Exception) -> None:
    assert files.writable_places(error) == f"; in {folder}, only data/ and runs/ can be written"


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: type(error).__name__)
def test_other_errors_stay_as_they_are(folder: Path, error: Exception) -> None:
    assert files.writable_places(error) == ""

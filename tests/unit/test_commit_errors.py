"""Checkpoint folders: what is left, and what is said, when something cannot be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from tests.unit.checkpoints import FILES, NAME, failing_at, names, save, writers
from trainer.checkpoint.disk.commit import commit, prune
from trainer.checkpoint.disk.committed import find
from trainer.errors import TrainerError


def test_a_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        commit(tmp_path, NAME, {**writers(), "last": fail}, {})
    assert names(tmp_path) == []


def test_a_full_disk_says_how_much_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = save(tmp_path, 1)
    failing_at(monkeypatch, "write", 1, errno.ENOSPC)
    with pytest.raises(TrainerError) as caught:
        save(tmp_path, 2)
    size = sum(file.stat().st_size for file in earlier.iterdir())
    text = str(caught.value)
    assert text.startswith(f"checkpoint {tmp_path}/attempt-0001-epoch-0001-update-00000002 cannot be written: ")
    assert "loader.json: No space left on device; 3,000,000 bytes of it were written; " in text
    assert text.endswith(f" were free; {earlier.name} takes {size:,}")
    assert "\n" not in text
    assert names(tmp_path) == [earlier.name]
    save(tmp_path, 2)


def test_a_quota_has_no_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_at(monkeypatch, "write", 0, errno.EDQUOT)
    with pytest.raises(TrainerError, match=r"weights\.pt: Disk quota exceeded; 0 bytes of it were written$"):
        save(tmp_path, 1)


@pytest.mark.parametrize("failed", range(6))
def test_a_sync_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: int) -> None:
    earlier = save(tmp_path, 1)
    failing_at(monkeypatch, "fsync", failed, errno.EIO)  # four files, the partial folder, its parent
    with pytest.raises(TrainerError, match=r"cannot be written: \S+: Input/output error$"):
        save(tmp_path, 2)
    assert names(tmp_path) == [earlier.name]


def test_a_folder_that_cannot_be_synced_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("checkpoints").mkdir()
    failing_at(monkeypatch, "fsync", 4, errno.EINVAL, errno.EINVAL)
    path = save(tmp_path / "checkpoints", 1)
    failing_at(monkeypatch, "fsync", 0, errno.EINVAL)
    prune(path.parent, [])
    assert names(path.parent) == []


@pytest.mark.parametrize("share", [0.3, 0.0])
def test_short_writes_are_completed_or_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    write, calls = os.write, list[int]()

    def short(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        return write(descriptor, data[: int(share * len(data))]) if len(calls) < 4 else write(descriptor, data)

    monkeypatch.setattr(os, "write", short)
    if share:
        assert (save(tmp_path, 1) / "weights.pt").read_bytes() == FILES["weights.pt"]
        assert len(calls) > len(FILES)
    else:
        with pytest.raises(TrainerError, match=r"weights\.pt: the file system takes no more bytes$"):
            save(tmp_path, 1)
        assert names(tmp_path) == []


def test_a_file_that_is_shorter_than_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:-1]) + 1)
    with pytest.raises(TrainerError, match=r"weights\.pt: it has 2,999,999 bytes after 3,000,000 were written$"):
        save(tmp_path, 1)


def test_an_interrupted_removal_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    with monkeypatch.context() as broken:
        failing_at(broken, "unlink", 1, errno.EIO)
        with pytest.raises(TrainerError, match=r"^old checkpoints in \S+ cannot be removed: Input/output error$"):
            prune(tmp_path, [newer])
    assert find(tmp_path) == [newer]
    assert len(names(tmp_path)) == 2
    save(tmp_path, 1)
    prune(tmp_path, [newer])  # the same name again
    assert names(tmp_path) == [newer.name]
    assert not older.exists()


def test_a_full_disk_is_the_error_that_pytorch_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_at(monkeypatch, "write", 1, errno.ENOSPC)
    with pytest.raises(TrainerError, match=r"model\.pt: No space left on device"):
        commit(tmp_path, NAME, {"model.pt": lambda file: torch.save(torch.randn(1_000_000), file)}, {})
    assert names(tmp_path) == []


def test_a_writer_cannot_go_on_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_at(monkeypatch, "write", 0, errno.EIO)
    files, refused = list[BinaryIO](), list[OSError]()

    def careless(file: BinaryIO) -> None:
        files.append(file)
        for _ in range(3):
            try:
                file.write(b"1" * 5_000_000)
            except OSError as error:
                refused.append(error)

    with pytest.raises(TrainerError, match="Input/output error"):
        commit(tmp_path, NAME, {"careless": careless}, {})
    assert len(refused) == 3
    assert files[0].closed
    assert names(tmp_path) == []


def test_an_old_one_loses_no_file_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1)
    failing_at(monkeypatch, "fsync", 0, errno.EIO)
    with pytest.raises(TrainerError, match=r"^old checkpoints in \S+ cannot be removed: \S+: Input/output error$"):
        prune(tmp_path, [])
    assert find(tmp_path) == []
    assert names(tmp_path / f".{path.name}.removed") == ["empty", "loader.json", "manifest.json", "weights.pt"]

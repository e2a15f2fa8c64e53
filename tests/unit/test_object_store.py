"""examples/object_store.py with a folder as the store: what is fetched, what is uploaded, and what is removed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from examples.object_store import Mirror, main
from tests.unit.checkpoints import names, save
from trainer.checkpoint.disk.committed import load, name_of


def mirror_of(tmp_path: Path, folder: str) -> Mirror:
    (tmp_path / folder).mkdir(exist_ok=True)
    mirror = Mirror(f"file://{tmp_path}/store", tmp_path / folder)
    mirror.store.auto_mkdir = True  # an object store has no folders
    return mirror


def test_the_newest_and_the_best_are_in_the_store_and_come_to_a_new_host(tmp_path: Path) -> None:
    mirror = mirror_of(tmp_path, "first")
    for update in (1, 2, 3):
        save(mirror.folder, update, best=[0.5, name_of(1, 1, 2)])
        assert update == 2 or mirror.try_upload()
    assert names(tmp_path / "store") == names(mirror.folder)
    save(mirror.folder, 4, best=[0.5, name_of(1, 1, 2)])
    for update in (1, 3):  # as the training prunes
        (mirror.folder / name_of(1, 1, update)).rename(tmp_path / str(update))
    assert mirror.try_upload()
    assert names(tmp_path / "store") == [name_of(1, 1, 2), name_of(1, 1, 4)]

    second = mirror_of(tmp_path, "second")
    second.fetch()
    assert names(second.folder) == [name_of(1, 1, 2), name_of(1, 1, 4)]
    assert load(second.folder / name_of(1, 1, 4)).facts["best"] == [0.5, name_of(1, 1, 2)]


def test_the_newest_that_is_whole_is_fetched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for update in (1, 2, 3):
        save(tmp_path / "store", update, best=None)
    (tmp_path / "store" / name_of(1, 1, 3) / "manifest.json").unlink()
    (tmp_path / "store" / name_of(1, 1, 2) / "loader.json").write_bytes(b"[]")
    mirror = mirror_of(tmp_path, "folder")
    mirror.fetch()
    assert [path.name for path in mirror.folder.glob("attempt-*")] == [name_of(1, 1, 1)]
    assert f"{name_of(1, 1, 2)}: loader.json is damaged; it is skipped" in capsys.readouterr().err
    assert load(mirror.folder / name_of(1, 1, 1))

    (tmp_path / "store" / name_of(1, 1, 1) / "manifest.json").write_bytes(b"{")
    mirror.fetch()  # what the folder has is not fetched again


def test_a_store_that_cannot_be_read_is_not_taken_for_an_empty_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    url, started = f"file://{tmp_path}/file/run", tmp_path / "started"
    monkeypatch.setattr(sys, "argv", ["", url, str(tmp_path / "folder"), "--", "touch", str(started)])
    assert main() == 1
    assert not started.exists()
    assert capsys.readouterr().err.startswith(f"object_store: {url} cannot be read, and nothing is started: NotADir")

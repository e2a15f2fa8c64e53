"""Checkpoint folders: a copy on another host is committed with the same manifest, or not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.checkpoints import NAME, names, never, save, writers
from trainer.checkpoint.disk.commit import commit, receive
from trainer.checkpoint.disk.committed import Manifest, newest, send
from trainer.checkpoint.disk.durable import FileEntry
from trainer.errors import DataError


def test_a_copy_arrives_with_the_same_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.checkpoint.disk.committed._CHUNK_BYTES", 1_000_000)
    sent = commit(tmp_path / "a", NAME, writers(), {"samples": 7})
    chunks = list(send(sent.path))
    assert [len(chunk) for chunk in chunks[1:]] == [1_000_000] * 3 + [2]
    received = receive(tmp_path / "b", chunks)
    assert received.path == tmp_path / "b" / NAME
    assert newest(tmp_path / "b", never) == received
    assert {name: (received.path / name).read_bytes() for name in names(sent.path)} == {
        name: (sent.path / name).read_bytes() for name in names(sent.path)
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda chunks: [], "a checkpoint did not arrive as it was sent: manifest.json is damaged"),
        (lambda chunks: chunks[1:], "a checkpoint did not arrive as it was sent: manifest.json is damaged"),
        (lambda chunks: chunks[:1], f"checkpoint {NAME}: weights.pt did not arrive as it was sent"),
        (lambda chunks: chunks[:-1], f"checkpoint {NAME}: loader.json did not arrive as it was sent"),
        (lambda chunks: [*chunks[:-1], b"[]"], f"checkpoint {NAME}: loader.json did not arrive as it was sent"),
        (lambda chunks: [*chunks[:-1], b"{} "], f"checkpoint {NAME}: loader.json did not arrive as it was sent"),
    ],
)
def test_a_copy_that_did_not_arrive_is_not_there(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], message: str
) -> None:
    chunks = change(list(send(commit(tmp_path / "a", NAME, writers(), {}).path)))
    with pytest.raises(DataError) as caught:
        receive(tmp_path / "b", chunks)
    assert str(caught.value) == message
    assert not (tmp_path / "b").exists() or names(tmp_path / "b") == []


def test_a_file_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "loader.json").unlink()
    with pytest.raises(DataError, match=r"loader\.json is missing$"):
        list(send(path))


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest(name=NAME, facts={}, files={"../stolen": FileEntry(size=1, sha256="")}),
        Manifest(name="../stolen", facts={}, files={}),
        Manifest(name=NAME, facts={}, files={"a": FileEntry(size="1", sha256="")}),  # type: ignore[arg-type]
    ],
)
def test_a_manifest_that_was_sent_is_not_trusted(tmp_path: Path, manifest: Manifest) -> None:
    with pytest.raises(DataError, match=r"^a checkpoint did not arrive as it was sent: "):
        receive(tmp_path / "b", [manifest.to_bytes(), b"1"])
    assert names(tmp_path) == []

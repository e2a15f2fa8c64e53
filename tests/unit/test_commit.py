"""Checkpoint folders: committed or not there, whatever fails."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpoints import FILES, NAME, failing_at, names, never, save, writers
from trainer.checkpoint.disk.commit import commit, prune, remove_partial
from trainer.checkpoint.disk.committed import Manifest, find, load, name_of, newest
from trainer.checkpoint.disk.durable import FileEntry
from trainer.errors import ConfigError, DataError, TrainerError


def test_what_was_committed_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "checkpoints"
    facts: dict[Any, Any] = {"epoch": 2, "shape": (1, 2), 3: None, "loss": float("inf")}
    committed = commit(folder, NAME, writers(), facts)
    assert committed.order == (1, 2, 300)
    assert committed.facts == {"epoch": 2, "shape": [1, 2], "3": None, "loss": float("inf")}
    assert {name: entry.size for name, entry in committed.files.items()} == {k: len(v) for k, v in FILES.items()}
    assert newest(folder, never) == committed == load(folder / NAME)
    assert {name: (folder / NAME / name).read_bytes() for name in FILES} == FILES
    assert names(folder) == [NAME]


def test_the_newest_goes_by_numbers_not_by_text(tmp_path: Path) -> None:
    orders = [(1, 9999, 1), (1, 10000, 0), (2, 1, 5), (2, 1, 100_000_000), (10000, 0, 0)]
    for order in reversed(orders):
        commit(tmp_path, name_of(*order), {}, {})
    assert find(tmp_path) == [tmp_path / name_of(*order) for order in reversed(orders)]
    assert find(tmp_path / "none") == []
    assert newest(tmp_path / "none", never) is None


def damage(path: Path, change: str) -> None:
    match change:
        case "has 2,999,999 bytes instead of 3,000,000":
            os.truncate(path, path.stat().st_size - 1)
        case "is missing":
            path.unlink()
        case "cannot be read: Is a directory":
            path.unlink()
            path.mkdir()
        case _:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("weights.pt", "has 2,999,999 bytes instead of 3,000,000"),
        ("weights.pt", "is missing"),
        ("weights.pt", "cannot be read: Is a directory"),
        ("weights.pt", "is damaged: its hash is not the manifest's"),
        ("manifest.json", "is missing"),
        ("manifest.json", "is damaged"),
        ("manifest.json", "cannot be read: Is a directory"),
    ],
)
def test_damage_is_named_once_and_an_older_one_is_taken(tmp_path: Path, file: str, problem: str) -> None:
    older, newer, bad = save(tmp_path, 1), save(tmp_path, 2), list[str]()
    damage(newer / file, problem)
    checkpoint = newest(tmp_path, bad.append)
    assert checkpoint is not None
    assert checkpoint.path == older
    assert bad == [f"checkpoint {newer}: {file} {problem}"]
    # Training goes on from the older one, and comes to the damaged one's place again.
    save(tmp_path, 2)
    assert load(newer).path == newer
    prune(tmp_path, [older, newer])
    assert names(tmp_path) == [older.name, newer.name]


def test_any_changed_byte_of_a_manifest_is_noticed() -> None:
    manifest = Manifest(name=NAME, facts={"samples": 12}, files={"a": FileEntry(size=1, sha256="6b86b273ff34fce1")})
    whole = manifest.to_bytes()
    assert Manifest.from_bytes(whole) == manifest
    for position, byte in enumerate(whole):
        for flipped in {byte ^ 1, byte ^ 128, 10} - {byte}:
            with pytest.raises(DataError, match=r"^manifest\.json (is damaged|has format \d+; this version)"):
                Manifest.from_bytes(whole[:position] + bytes([flipped]) + whole[position + 1 :])
        with pytest.raises(DataError, match="is damaged"):
            Manifest.from_bytes(whole[:position])


def test_another_format_is_named(tmp_path: Path) -> None:
    manifest = save(tmp_path, 1) / "manifest.json"
    manifest.write_text(json.dumps({"format": 2, "shards": []}))
    for read in (load, lambda path: newest(path.parent, never)):  # which is not passed over, and then removed
        with pytest.raises(ConfigError, match=r"manifest\.json has format 2; this version of trainer reads format 1$"):
            read(manifest.parent)


@pytest.mark.parametrize("call", ["read", "open"])
def test_what_cannot_be_read_for_a_while_is_not_passed_over(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1), save(tmp_path, 2)

    def stale(*_: object) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(f"trainer.checkpoint.disk.committed.{call}_file", stale)
    with pytest.raises(TrainerError, match=r"update-00000002: .* cannot be read: Stale file handle$") as raised:
        newest(tmp_path, never)
    assert not isinstance(raised.value, DataError)


def test_a_valid_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    path = save(tmp_path, 1, samples=5)
    with pytest.raises(TrainerError, match=r"^checkpoint \S+ is there already$"):
        save(tmp_path, 1, samples=6)
    assert load(path).facts == {"samples": 5}
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "/a", "a\0", "manifest.json"])
def test_a_file_lies_in_the_checkpoint_itself(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="valid is a plain file name"):
        commit(tmp_path, NAME, writers({name: b""}), {})
    assert names(tmp_path) == []


def test_pruning_keeps_what_it_is_told_to(tmp_path: Path) -> None:
    paths = [save(tmp_path, update) for update in range(4)]
    (tmp_path / "notes").mkdir()
    prune(tmp_path, paths[2:])
    assert names(tmp_path) == [paths[2].name, paths[3].name, "notes"]
    prune(tmp_path / "none", [])


def test_what_interrupted_calls_left_is_removed(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    others = [".notes.partial", ".run.json.partial", f".{NAME}.backup"]
    for name in (f".{NAME}.partial", f".{NAME}.removed", f".{path.name}.partial", *others):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / "file").touch()
    (tmp_path / f".{name_of(4, 0, 0)}.partial").symlink_to(tmp_path / others[0])
    remove_partial(tmp_path)
    assert names(tmp_path) == sorted([*others, path.name])
    assert (tmp_path / others[0] / "inner" / "file").exists()
    remove_partial(tmp_path / "none")


def test_a_full_disk_leaves_the_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = save(tmp_path, 1)
    for code, reason in [(errno.ENOSPC, "No space left on device"), (errno.EDQUOT, "Disk quota exceeded")]:
        failing_at(monkeypatch, "write", 1, code)
        with pytest.raises(TrainerError) as caught:
            save(tmp_path, 2)
        path = f"{tmp_path}/attempt-0001-epoch-0001-update-00000002"
        assert str(caught.value) == f"checkpoint {path} cannot be written: loader.json: {reason}"
        assert names(tmp_path) == [earlier.name]
    save(tmp_path, 2)


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


def test_a_full_disk_is_the_error_that_pytorch_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_at(monkeypatch, "write", 1, errno.ENOSPC)
    with pytest.raises(TrainerError, match=r"model\.pt: No space left on device"):
        commit(tmp_path, NAME, {"model.pt": lambda file: torch.save(torch.randn(1_000_000), file)}, {})
    assert names(tmp_path) == []


def test_an_old_one_loses_no_file_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1)
    failing_at(monkeypatch, "fsync", 0, errno.EIO)
    with pytest.raises(TrainerError, match=r"^old checkpoints in \S+ cannot be removed: \S+: Input/output error$"):
        prune(tmp_path, [])
    assert find(tmp_path) == []
    assert names(tmp_path / f".{path.name}.removed") == ["empty", "loader.json", "manifest.json", "weights.pt"]

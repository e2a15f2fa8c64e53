"""Checkpoint folders: committed or not there, whatever fails."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

from tests.unit.checkpoints import FILES, NAME, Writer, failing_at, names, never, save, writers
from trainer.checkpoint.disk import durable
from trainer.checkpoint.disk.commit import commit, prune, remove_partial
from trainer.checkpoint.disk.committed import Manifest, find, load, name_of, newest, order_of
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


def test_a_renamed_copy_keeps_its_numbers(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    path.rename(tmp_path / "best")
    assert load(tmp_path / "best").order == (1, 1, 7)


@pytest.mark.parametrize("numbers", [(0, 0, 0), (3, 2, 1200), (12345, 10**9, 10**12)])
def test_a_name_gives_its_numbers_back(numbers: tuple[int, int, int]) -> None:
    assert order_of(name_of(*numbers)) == numbers


@pytest.mark.parametrize(
    "name",
    [
        "attempt-00001-epoch-0001-update-00000001",  # name_of writes fewer digits
        "attempt-0001-epoch-0001-update-00000001.old",
        ".attempt-0001-epoch-0001-update-00000001",
        "attempt-٠٠٠١-epoch-0001-update-00000001",
        "attempt-0001-epoch--001-update-00000001",  # name_of makes it of a negative number
        "latest",
    ],
)
def test_other_names_are_no_checkpoints(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert find(tmp_path) == []
    with pytest.raises(ValueError, match="no name of a checkpoint"):
        commit(tmp_path, name, {}, {})
    assert names(tmp_path) == [name]


def test_the_newest_goes_by_numbers_not_by_text(tmp_path: Path) -> None:
    orders = [(1, 9999, 1), (1, 10000, 0), (2, 1, 5), (2, 1, 100_000_000), (10000, 0, 0)]
    for order in reversed(orders):
        commit(tmp_path, name_of(*order), {}, {})
    assert find(tmp_path) == [tmp_path / name_of(*order) for order in reversed(orders)]
    assert find(tmp_path / "none") == []
    assert newest(tmp_path / "none", never) is None


def test_the_folder_must_be_readable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"^checkpoints in \S+/file cannot be listed: Not a directory$"):
        find(tmp_path / "file")
    with pytest.raises(TrainerError, match=r"^checkpoint \S+ cannot be written: file: File exists$"):
        save(tmp_path / "file", 1)


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


def test_one_that_is_pruned_while_it_is_read_is_not_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    prune(tmp_path, [older])
    listings = iter([[newer, older], [older]])
    monkeypatch.setattr("trainer.checkpoint.disk.committed.find", lambda folder: next(listings))
    checkpoint = newest(tmp_path, never)
    assert checkpoint is not None
    assert checkpoint.path == older


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


def test_a_check_sees_the_files_and_can_stop_the_commit(tmp_path: Path) -> None:
    seen = list[list[str]]()
    commit(tmp_path, NAME, writers(), {}, check=lambda place: seen.append(names(place)))
    assert seen == [sorted(FILES)]

    def refuse(place: Path) -> None:
        raise DataError("not finite")

    with pytest.raises(DataError, match="not finite"):
        commit(tmp_path, name_of(2, 0, 0), writers(), {}, check=refuse)
    assert names(tmp_path) == [NAME]


def test_pruning_keeps_what_it_is_told_to(tmp_path: Path) -> None:
    paths = [save(tmp_path, update) for update in range(4)]
    (tmp_path / "notes").mkdir()
    prune(tmp_path, paths[2:])
    assert names(tmp_path) == [paths[2].name, paths[3].name, "notes"]
    prune(tmp_path / "none", [])


def test_pruning_leaves_alone_what_is_being_written(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    commit(tmp_path, NAME, writers(), {}, check=lambda place: prune(tmp_path, []))
    assert names(tmp_path) == [NAME]
    assert not path.exists()
    load(tmp_path / NAME)


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


def test_a_left_over_does_not_stop_a_commit(tmp_path: Path) -> None:
    (tmp_path / f".{NAME}.partial").mkdir(parents=True)
    (tmp_path / f".{NAME}.partial" / "weights.pt").touch()
    commit(tmp_path, NAME, writers(), {})
    assert names(tmp_path) == [NAME]


def test_pytorch_and_numpy_write_through_the_hash(tmp_path: Path) -> None:
    state = {"weights": torch.randn(1000, 500), "step": torch.tensor(3)}
    array = np.arange(300_000)
    files: dict[str, Writer] = {
        "model.pt": lambda file: torch.save(state, file),
        "array.npy": lambda file: np.save(file, array),
        "closed": lambda file: io.TextIOWrapper(file, write_through=True).write("text"),
    }
    path = commit(tmp_path, NAME, files, {}).path
    load(path)
    read = torch.load(path / "model.pt", weights_only=True, mmap=True)
    assert torch.equal(read["weights"], state["weights"])
    assert np.array_equal(np.load(path / "array.npy"), array)
    assert (path / "closed").read_text() == "text"


def test_new_folders_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = list[Path]()
    monkeypatch.setattr(durable, "sync_folder", synced.append)
    for _ in range(2):
        durable.make_folder(tmp_path / "runs" / "checkpoints")
    assert synced == [tmp_path, tmp_path / "runs"]


def test_a_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        commit(tmp_path, NAME, {**writers(), "last": fail}, {})
    assert names(tmp_path) == []


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

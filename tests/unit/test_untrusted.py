"""What others may have written neither hangs, fills the memory, nor leads where it should not."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from examples.strategies.parameter_server.wire import decode, encode
from trainer.checkpoint.disk.committed import Manifest, load, name_of
from trainer.checkpoint.disk.durable import FileEntry
from trainer.checkpoint.disk.lock import lock_folder
from trainer.errors import DataError, TrainerError
from trainer.files import save_atomically
from trainer.ops.supervise.folder import Events, locked
from trainer.ops.verdict import parse_verdict
from trainer.report.run_record import _append
from trainer.untrusted import parse_json, read_dict, read_file
from trainer.watch.heartbeat import Heartbeat, Record

DEEP = "[" * 100_000
NAME = name_of(1, 2, 3)


def test_nested_json_is_refused() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(DEEP)
    assert parse_verdict(DEEP) is None
    assert parse_verdict('{"kind": "hang", "text": "", "culprits": [1e999]}') is None


def test_a_pipe_and_a_file_of_a_terabyte_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        read_file(tmp_path / "pipe")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="1,099,511,627,776 bytes"):
        read_file(tmp_path / "sparse")


@pytest.mark.parametrize("place", ["manifest.json", "state.pt"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_checkpoint_with_a_pipe_or_a_device_is_damaged(tmp_path: Path, place: str, kind: str) -> None:
    entry = FileEntry(size=0, sha256="")
    (tmp_path / "manifest.json").write_bytes(Manifest(name=NAME, facts={}, files={"state.pt": entry}).to_bytes())
    (tmp_path / place).unlink(missing_ok=True)
    os.mkfifo(tmp_path / place) if kind == "pipe" else (tmp_path / place).symlink_to("/dev/zero")
    with pytest.raises(DataError, match=f"{place} cannot be read: it is no regular file"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["\ud800", "a\nb", "\0"])
def test_a_file_name_that_no_disk_has_is_refused(name: str) -> None:
    files = {name: FileEntry(size=0, sha256="")}
    with pytest.raises(DataError, match="valid is a plain file name"):
        Manifest.from_bytes(Manifest(name=NAME, facts={}, files=files).to_bytes())


def test_the_lock_follows_no_link_and_waits_for_no_pipe(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(TrainerError, match="cannot be written"):
        lock_folder(tmp_path, "job")
    assert (tmp_path / "precious").read_text() == "text"
    (tmp_path / ".lock").unlink()
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(TrainerError, match="no regular file"):
        lock_folder(tmp_path, "job")


WRITERS: dict[str, Callable[[Path], object]] = {
    ".model.pt.partial": lambda folder: save_atomically(folder / "model.pt", 1),
    "events.jsonl": lambda folder: Events(folder / "events.jsonl").say("start", "text"),
    "lock": lambda folder: locked(folder, "job").__enter__(),
    "steps.jsonl": lambda folder: _append(folder / "steps.jsonl", {}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_follows_no_link_of_somebody_else(name: str, tmp_path: Path) -> None:
    """In a folder that is a link itself, as to a larger disk."""
    folder, precious = tmp_path / "runs", tmp_path / "precious"
    (tmp_path / "disk").mkdir()
    folder.symlink_to(tmp_path / "disk")
    with suppress(FileNotFoundError):
        WRITERS[name](folder)
    before = {path.name for path in folder.iterdir()}
    precious.write_text("text\n")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(precious)
    with suppress(OSError, TrainerError):
        WRITERS[name](folder)
    assert precious.read_text() == "text\n"
    assert not any(path.read_bytes() == b"text\n" for path in folder.iterdir() if not path.is_symlink())
    assert {path.name for path in folder.iterdir()} == before | ({name} - {".model.pt.partial"})


def test_a_heartbeat_names_its_process() -> None:
    record = Record(rank=1, head=b"trainer-heartbeat 12\n")
    assert Heartbeat.from_bytes(bytes(record)) is not None
    for head in (b"x", b"-1\n", b"0\n", b"1" * 20 + b"\n"):
        record.head = b"trainer-heartbeat " + head
        assert Heartbeat.from_bytes(bytes(record)) is None


@pytest.mark.parametrize("kind", ["O", "f4,f4", "V0", "(9999,9999)f4", "float", ""])
def test_a_chunk_is_of_numbers(kind: str) -> None:
    with pytest.raises(ValueError, match="not a chunk"):
        decode(encode(kind, bytes(8)))


def test_a_record_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_bytes(b"\xff")
    assert read_dict(tmp_path / "settings.json") == {}

"""What others may have written neither hangs, fills the memory, nor leads where it should not."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from trainer.checkpoint.disk.committed import Manifest, load, name_of
from trainer.checkpoint.disk.durable import FileEntry
from trainer.checkpoint.disk.lock import FolderLock
from trainer.errors import ConfigError, DataError, TrainerError
from trainer.files import save_atomically
from trainer.ops.config_file import read_config
from trainer.ops.supervise.folder import Events, locked, read_former, write_job
from trainer.ops.supervise.hosts import parse_hosts
from trainer.ops.supervise.options import add_parser, make_parser
from trainer.report.run_record import _append, _checkpoints_of, _keep
from trainer.strategies.comparisons.parameter_server.wire import decode, encode
from trainer.untrusted import parse_json, read_file
from trainer.watch.heartbeat import Heartbeat
from trainer.watch.job_folder import parse_verdict

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


def test_a_former_job_is_neither_an_option_nor_a_path(tmp_path: Path) -> None:
    entry: dict[str, Any] = {"job": uuid.uuid4().hex, "hosts": [["a", 1]], "supervisor": 1}

    def write(**changes: Any) -> None:
        (tmp_path / "job.json").write_text(json.dumps({**entry, **changes}))

    write()
    assert read_former(tmp_path) is not None
    changes: list[dict[str, Any]] = [{"job": "x/../.."}, {"job": "0"}, {"hosts": [["-oProxyCommand=touch /tmp/x", 1]]}]
    for change in [*changes, {"hosts": [["a", "1" * 5000]]}, {"supervisor": float("inf")}]:
        write(**change)
        assert read_former(tmp_path) is None


def test_the_lock_follows_no_link_and_waits_for_no_pipe(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    assert "cannot be written" in FolderLock(tmp_path, "job").acquire()
    assert (tmp_path / "precious").read_text() == "text"
    (tmp_path / ".lock").unlink()
    os.mkfifo(tmp_path / ".lock")
    assert "no regular file" in FolderLock(tmp_path, "job").acquire()


WRITERS: dict[str, Callable[[Path], object]] = {
    "job.json": lambda folder: write_job(folder, "", ()),
    ".job.json.partial": lambda folder: write_job(folder, "", ()),
    ".model.pt.partial": lambda folder: save_atomically(folder / "model.pt", 1),
    "events.jsonl": lambda folder: Events(folder / "events.jsonl").note("start"),
    "lock": lambda folder: locked(folder).__enter__(),
    "steps.jsonl": lambda folder: _append(folder / "steps.jsonl", {}),
    "epochs.jsonl": lambda folder: _keep(folder / "epochs.jsonl", lambda line: True),
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
    assert {path.name for path in folder.iterdir()} == before | ({name} - {".job.json.partial", ".model.pt.partial"})


@pytest.mark.parametrize("process", [-1, 0, 1, True, "x", 1e300, None, os.getppid()])
def test_only_who_has_the_lock_open_is_signalled(
    tmp_path: Path, process: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    signalled: list[object] = []
    monkeypatch.setattr(os, "kill", lambda *told: signalled.append(told))
    lock = FolderLock(tmp_path, "job")
    assert lock.acquire() == ""
    lock.signal_holder(signal.SIGUSR2)
    assert signalled == [(os.getpid(), signal.SIGUSR2)]
    holder = json.loads((tmp_path / ".lock").read_text())
    (tmp_path / ".lock").write_text(json.dumps({**holder, "process": process}))
    lock.signal_holder(signal.SIGUSR2)
    assert len(signalled) == 1
    lock.release()


@pytest.mark.parametrize("text", ["a = " + DEEP, ".".join(["a"] * 2000) + " = 1", f"[run]\nname = 0x{'f' * 5000}"])
def test_a_config_file_that_cannot_be_shown_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"nested too deeply|more than 64 bits"):
        read_config(str(tmp_path / "job.toml"), add_parser(make_parser("trainer").add_subparsers()))


@pytest.mark.parametrize("text", ["a:" + "9" * 5000, "a:٣", "a:0"])
def test_slots_are_a_number_of_six_digits(text: str) -> None:
    with pytest.raises(ConfigError, match="valid is HOST:SLOTS"):
        parse_hosts(text)


def test_a_heartbeat_names_its_process() -> None:
    heartbeat = Heartbeat(rank=1)
    heartbeat.pid = 12
    assert Heartbeat.from_bytes(bytes(heartbeat)) is not None
    for head in (b"x", b"-1\n", b"0\n", b"1" * 20 + b"\n"):
        heartbeat._head = b"trainer-heartbeat " + head
        assert Heartbeat.from_bytes(bytes(heartbeat)) is None


@pytest.mark.parametrize("kind", ["O", "f4,f4", "V0", "(9999,9999)f4", "float", ""])
def test_a_chunk_is_of_numbers(kind: str) -> None:
    with pytest.raises(ValueError, match="not a chunk"):
        decode(encode(kind, bytes(8)))


def test_a_record_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_bytes(b"\xff")
    assert _checkpoints_of(tmp_path) is None
    lines = b'\xff\n[]\n{"step": "a"}\n{"step": 1}\n'
    (tmp_path / "steps.jsonl").write_bytes(lines + b'{"step": 2}\n{"st')
    _keep(tmp_path / "steps.jsonl", lambda line: line["step"] <= 1)
    assert (tmp_path / "steps.jsonl").read_bytes() == lines

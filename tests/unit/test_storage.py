"""Which checkpoint the hosts of a job go on from, and that each has it afterwards."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from tests.unit.checkpoints import FACTS
from trainer.checkpoint.disk.commit import commit
from trainer.checkpoint.disk.committed import MANIFEST, Committed, load, name_of
from trainer.checkpoint.run import storage
from trainer.checkpoint.run.storage import Storage
from trainer.errors import TrainerError


class Ranks:
    """Two ranks, each a thread on a host of its own; stands for their strategies."""

    shards, own = False, threading.local()

    def __init__(self) -> None:
        self._values: list[Any] = [None, None]
        self._barrier = threading.Barrier(2, timeout=20)

    @property
    def world(self) -> Any:
        rank = self.own.rank
        return SimpleNamespace(rank=rank, local_rank=0, size=2, host="ab"[rank], is_root=rank == 0)

    def all_gather_object(self, value: Any) -> list[Any]:
        self._values[self.own.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return self.all_gather_object(value)[root]

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        def on(rank: int) -> Any:
            self.own.rank = rank
            return work(rank)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(on, (0, 1)))


def save(folder: Path, attempt: int, updates: int, content: str) -> None:
    commit(folder, name_of(attempt, 0, updates), {"state": lambda file: file.write(content.encode())}, FACTS)


def contents(folders: list[Path]) -> list[str]:
    """Return what each host goes on from."""
    ranks = Ranks()

    def start(rank: int) -> Committed | None:
        kept = Storage(folders[rank], ranks)  # type: ignore[arg-type]
        try:
            return kept.find_start()
        finally:
            kept.close()

    return [(checkpoint.path / "state").read_text() if checkpoint else "" for checkpoint in ranks.run(start)]


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a", tmp_path / "b"]


def test_the_newest_of_all_hosts_is_handed_over(folders: list[Path]) -> None:
    save(folders[0], 1, 20, "older")
    save(folders[1], 1, 30, "newer")
    assert contents(folders) == ["newer", "newer"]
    path = folders[0] / name_of(1, 0, 30)
    assert path.joinpath(MANIFEST).read_bytes() == (folders[1] / path.name / MANIFEST).read_bytes()
    assert load(path).path == path


def test_hosts_that_have_trained_the_same_updates_apart_go_on_from_one_checkpoint(folders: list[Path]) -> None:
    save(folders[0], 2, 30, "on a")
    save(folders[1], 2, 30, "on b, which was cut off")
    assert contents(folders) == ["on a", "on a"]


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_what_does_not_arrive_as_it_was_sent_is_not_there(
    chunk: int, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_CHUNK_BYTES", chunk)
    save(folders[0], 1, 30, "content")
    whole = storage._read

    def changed(path: Path) -> Iterator[tuple[bytes, str]]:
        return ((data.replace(b"t", b"d"), problem) for data, problem in whole(path))

    monkeypatch.setattr(storage, "_read", changed)
    with pytest.raises(TrainerError, match="did not arrive as it was sent"):
        contents(folders)
    assert [path.name for path in folders[1].iterdir()] == [".lock"]
    monkeypatch.setattr(storage, "_read", whole)
    assert contents(folders) == ["content", "content"]


def test_a_checkpoint_that_can_no_longer_be_read_is_told_on_all_hosts(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> BinaryIO:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(storage, "open_file", refuse)
    save(folders[0], 1, 30, "content")
    with pytest.raises(TrainerError, match="state cannot be read: Input/output error"):
        contents(folders)
    assert [path.name for path in folders[1].iterdir()] == [".lock"]


def test_those_that_were_found_to_be_damaged_do_not_count_as_valid(folders: list[Path]) -> None:
    save(folders[0], 1, 10, "valid")
    save(folders[0], 1, 20, "damaged")
    (folders[0] / name_of(1, 0, 20) / "state").write_text("other")
    ranks = Ranks()

    def start(rank: int) -> Any:
        kept = Storage(folders[rank], ranks)  # type: ignore[arg-type]
        kept.find_start()
        save(folders[rank], kept.attempt, 15, "new")
        kept.close()
        return [path.name for path in kept.valid_paths()]

    assert ranks.run(start) == [[name_of(2, 0, 15), name_of(1, 0, 10)]] * 2

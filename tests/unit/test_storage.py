"""Which checkpoint the hosts of a job go on from, and that each has it afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.checkpoints import FACTS
from trainer.checkpoint.disk.commit import commit
from trainer.checkpoint.disk.committed import Committed, name_of
from trainer.checkpoint.run import storage
from trainer.checkpoint.run.storage import Storage


class Ranks:
    """Two ranks, each a thread on a host of its own; stands for their strategies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._own, self._values = threading.local(), [None, None]
        self._barrier = threading.Barrier(2, timeout=20)
        monkeypatch.setattr(storage, "host_id", lambda: "ab"[self._own.rank])

    @property
    def world(self) -> Any:
        rank = self._own.rank
        return SimpleNamespace(rank=rank, size=2, host="ab"[rank], is_root=rank == 0)

    def all_gather_object(self, value: Any) -> list[Any]:
        self._values[self._own.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return self.all_gather_object(value)[root]

    def run(self, work: Callable[[int], Committed | None]) -> list[Committed | None]:
        def on(rank: int) -> Committed | None:
            self._own.rank = rank
            return work(rank)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(on, (0, 1)))


def save(folder: Path, attempt: int, updates: int, content: str) -> None:
    commit(folder, name_of(attempt, 0, updates), {"state": lambda file: file.write(content.encode())}, FACTS)


def contents(ranks: Ranks, folders: list[Path]) -> list[str]:
    """Return what each host goes on from."""

    def newest(rank: int) -> Committed | None:
        kept = Storage(folders[rank], ranks)  # type: ignore[arg-type]
        checkpoint = kept.newest()
        kept.close()
        return checkpoint

    return [(checkpoint.path / "state").read_text() if checkpoint else "" for checkpoint in ranks.run(newest)]


def test_the_newest_of_all_hosts_is_handed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    save(folders[0], 1, 20, "older")
    save(folders[1], 1, 30, "newer")
    assert contents(Ranks(monkeypatch), folders) == ["newer", "newer"]


def test_hosts_that_have_trained_the_same_updates_apart_go_on_from_one_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    save(folders[0], 2, 30, "on a")
    save(folders[1], 2, 30, "on b, which was cut off")
    assert contents(Ranks(monkeypatch), folders) == ["on a", "on a"]

"""The store that the ranks of one host share: a file in memory, which nobody else finds. Ranks are threads here."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.unit.ranks_as_threads import Threads
from trainer import World
from trainer.cluster import network
from trainer.cluster import process_group as module
from trainer.cluster.process_group import _init_process_group, _open_file, _share_memory

DESCRIPTORS = Path("/proc/self/fd")


def stores_of(ranks: int) -> list[Any]:
    """Return the store of each rank of a new start."""
    threads = Threads(ranks)

    def share(rank: int) -> Any:
        return _share_memory(World(rank=rank, size=ranks), threads.strategy(rank).all_gather_object)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(share, range(ranks)))


def memory_files() -> list[str]:
    return [link for entry in DESCRIPTORS.iterdir() if "trainer.store" in (link := _link(entry))]


def _link(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:
        return ""  # the descriptor that has listed the folder


@contextmanager
def closed_afterwards() -> Iterator[None]:
    """Close what stores have left open: they do so until the process ends."""
    before = set(DESCRIPTORS.iterdir())
    try:
        yield
    finally:
        for entry in DESCRIPTORS.iterdir():
            if entry not in before and "trainer.store" in _link(entry):
                os.close(int(entry.name))


def test_many_ranks_find_what_the_others_have_put_there() -> None:
    ranks = 16
    with closed_afterwards():
        stores = stores_of(ranks)

        def use(rank: int) -> list[bytes]:
            store = stores[rank]
            store.set(f"address of {rank}", f"{rank}")
            others = [store.get(f"address of {other}") for other in range(ranks)]
            if store.add("arrived", 1) == ranks:
                store.set("all", "here")
            store.wait(["all"], timedelta(seconds=30))
            return others

        with ThreadPoolExecutor(ranks) as pool:
            assert list(pool.map(use, range(ranks))) == [[b"%d" % rank for rank in range(ranks)]] * ranks
        assert stores[0].add("arrived", 0) == ranks
        stores.clear()


def test_two_starts_do_not_meet_and_none_leaves_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with closed_afterwards():
        first, second = stores_of(2), stores_of(2)
        first[0].set("key", "of the first")
        assert first[1].get("key") == b"of the first"
        assert not second[1].check(["key"])
        first.clear()
        third = stores_of(2)
        assert not third[0].check(["key"])
        assert list(tmp_path.iterdir()) == []
        second.clear()
        third.clear()


@pytest.mark.parametrize("function", ["_make_file", "_open_file"])
def test_where_a_rank_cannot_open_it_no_rank_takes_it(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = memory_files()
    monkeypatch.setattr(module, function, lambda *_: None)
    assert stores_of(3) == [None] * 3
    assert memory_files() == before


def test_a_file_of_another_name_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")  # whose opening would wait
    descriptor = os.memfd_create("trainer.store.another")
    try:
        for path in (tmp_path / "file", tmp_path / "pipe", tmp_path / "none", f"/proc/self/fd/{descriptor}"):
            assert _open_file(str(path), "trainer.store.this") is None
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(("hosts", "is_shared"), [(("a", "a"), True), (("a", "b"), False)])
def test_a_job_on_one_host_serves_no_store(
    hosts: tuple[str, str], is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several hosts it does, as without a file that all ranks can open."""
    threads, stores, this = Threads(2), {}, threading.local()
    monkeypatch.setattr(
        module, "_over_launcher", lambda world: nullcontext(threads.strategy(world.rank).all_gather_object)
    )
    monkeypatch.setattr(network, "host_id", lambda: hosts[this.rank])
    monkeypatch.setattr(network, "address_toward", lambda _: "127.0.0.1")
    monkeypatch.setattr(network, "choose_gloo_interface", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, store, rank, **__: stores.update({rank: store}))

    def join(rank: int) -> None:
        this.rank = rank
        _init_process_group("gloo", World(rank=rank, size=2))

    with closed_afterwards():
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(join, range(2)))
        kind: Any = dist.FileStore if is_shared else dist.TCPStore  # type: ignore[attr-defined]
        assert [type(stores[rank]) for rank in range(2)] == [kind, kind]
        stores[0].set("key", "value")
        assert stores[1].get("key") == b"value"
        stores.clear()

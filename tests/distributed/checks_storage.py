"""Checkpoints on hosts that share no folder, as ranks with folders of their own; run on every rank of one job."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.checks_checkpoints import shared_folder
from tests.unit.checkpoints import FACTS
from trainer import TrainerError
from trainer.checkpoint.disk.commit import commit
from trainer.checkpoint.disk.committed import find, load, name_of
from trainer.checkpoint.run.storage import Storage
from trainer.strategies.base import Strategy

CONTENT = bytes(range(256)) * 1000


@contextmanager
def each_rank_a_host(strategy: Strategy) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "world", replace(strategy.world, local_rank=0))
        yield


def save(folder: Path, attempt: int, update: int) -> None:
    content, facts = bytes([update]) + CONTENT, {**FACTS, "update": update}
    commit(folder, name_of(attempt, 0, update), {"state.pt": lambda stream: stream.write(content)}, facts)


def check_each_host_with_a_folder_of_its_own_writes_and_gets_the_newest(strategy: Strategy) -> None:
    rank, last = strategy.world.rank, strategy.world.size - 1
    with shared_folder(strategy) as parent, each_rank_a_host(strategy):
        folder = parent / f"host-{rank}"
        # Rank 0's host was away for an attempt: what it has is older, though of a later update.
        save(folder, 1, 9) if rank == 0 else save(folder, 2, 5)
        if rank == last:
            save(folder, 2, 7)
        storage = Storage(folder, strategy)
        assert storage.is_writer
        checkpoint = storage.find_start()
        assert checkpoint is not None
        expected = (2, 0, 7)
        assert (checkpoint.path, checkpoint.order) == (folder / name_of(*expected), expected)
        assert load(checkpoint.path).facts["update"] == expected[2]
        assert (checkpoint.path / "state.pt").read_bytes() == bytes([expected[2]]) + CONTENT
        storage.close()


def check_a_host_whose_checkpoints_are_gone_gets_one(strategy: Strategy) -> None:
    rank = strategy.world.rank
    with shared_folder(strategy) as parent, each_rank_a_host(strategy):
        folder = parent / f"host-{rank}"
        if rank == strategy.world.size - 1:
            save(folder, 3, 4)
        storage = Storage(folder, strategy)
        checkpoint = storage.find_start()
        assert checkpoint is not None
        assert [path.name for path in find(folder)] == [name_of(3, 0, 4)]
        storage.close()
        strategy.barrier()
        shutil.rmtree(folder)
        storage = Storage(folder, strategy)
        assert storage.find_start() is None
        storage.close()


def check_a_checkpoint_without_a_runs_facts_is_damaged_on_all(strategy: Strategy) -> None:
    with shared_folder(strategy) as folder:
        storage, path = Storage(folder, strategy), folder / name_of(1, 0, 3)
        if strategy.world.is_root:
            commit(folder, path.name, {}, {})
        assert storage.find_start() is None
        storage.close()


def check_a_copy_that_cannot_be_written_ends_all_ranks(strategy: Strategy) -> None:
    rank, last = strategy.world.rank, strategy.world.size - 1
    if last == 0:
        return
    with shared_folder(strategy) as parent, each_rank_a_host(strategy):
        folder = parent / f"host-{rank}"
        if rank == 0:
            save(folder, 1, 3)
        storage = Storage(folder, strategy)
        if rank == last:
            storage.folder = Path("/proc/no-such-folder")
        with pytest.raises(TrainerError, match=f"rank {last}.*no-such-folder"):
            storage.find_start()
        storage.close()

"""Saver: a rank's snapshots, which a thread commits beside the training, one at a time."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch

from trainer.checkpoint.disk.commit import begin, commit, contribute, prune
from trainer.checkpoint.disk.committed import Order, name_of
from trainer.checkpoint.disk.state_files import STATE, read_state
from trainer.checkpoint.run.snapshot import Snapshot
from trainer.checkpoint.run.storage import Storage
from trainer.cluster.output import print_line
from trainer.errors import TrainerError
from trainer.models.sharded import take_part


class Saver:
    """Writes this rank's files of each checkpoint; only `copy` is collective, where tensors are sharded."""

    def __init__(self, storage: Storage) -> None:
        self.error: TrainerError | None = None
        """Why this rank could not write the last checkpoint."""
        self.seconds: list[float] = []
        """Time of each commit, beside the training."""
        self.written: Order | None = None
        """The newest checkpoint that this rank has committed, or has written its part of."""
        self._storage, self._folder = storage, storage.folder
        self._others = [name for name in storage.parts if name != storage.part] if storage.is_writer else []
        self._snapshot, self._has_begun = Snapshot(keeps_parts=bool(storage.parts)), False
        # One thread for all: a new one for each snapshot would keep the training waiting until it runs. Python waits
        # for it, so that a script that ends lets it finish.
        self._pool = _make_pool()
        self._writing: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._writing is not None:
            wait([self._writing])

    def copy(self, state: Mapping[str, Any], order: Order | None = None) -> None:
        """Copy the state if this rank writes; raises as `Snapshot.copy`.

        Collective where tensors are sharded and ranks do not write their parts: those that write get them whole.

        Args:
            order: of the checkpoint that it is for. Where others write parts of it, they can once this has returned.
        """
        if not self._storage.writes:
            take_part(state)
            return
        self._snapshot.copy(state)
        self._has_begun = True
        if self._others and order:
            try:
                begin(self._folder, name_of(*order))
            except TrainerError as error:
                self.error, self._has_begun = error, False

    def commit(self, order: Order, random: list[Any], facts: Mapping[str, Any], keep: int) -> None:
        """Begin to commit what was copied, or to write this rank's part of it; `error` will say if that fails.

        Args:
            random: the random states of all ranks.
            keep: how many of the newest checkpoints stay in the folder, besides the best.
        """
        if self._storage.writes and self._has_begun:
            self._snapshot.state["random"] = random
            self._writing = self._pool.submit(self._commit, order, facts, keep)

    def close(self) -> None:
        """End the thread, once nothing is being written; another `commit` starts another."""
        self._pool.shutdown()
        self._pool = _make_pool()

    def _commit(self, order: Order, facts: Mapping[str, Any], keep: int) -> None:
        if self._storage.is_writer and self.written == order:
            return  # saved again, because another host could not write it
        started = time.monotonic()
        try:
            self._write(name_of(*order), facts)
            self.written, self.error = order, None
        except TrainerError as error:
            self.error = error
        except Exception as error:  # such as a MemoryError: nobody else would be told of it
            self.error = TrainerError(f"the checkpoint cannot be written: {type(error).__name__}: {error}")
        if self.error is None and self._storage.is_writer:
            self._prune(facts, keep)
        self.seconds.append(time.monotonic() - started)

    def _write(self, name: str, facts: Mapping[str, Any]) -> None:
        part = {self._storage.part: partial(torch.save, self._snapshot.parts)} if self._storage.part else {}
        if not self._storage.is_writer:
            for file, write in part.items():
                contribute(self._folder, name, file, write)
            return
        commit(
            self._folder,
            name,
            {STATE: partial(torch.save, self._snapshot.state), **part},
            facts,
            # A checkpoint that cannot be loaded is found at the first one.
            check=None if self.written else partial(read_state, is_mapped=True),
            others=self._others,
        )

    def _prune(self, facts: Mapping[str, Any], keep: int) -> None:
        """Remove old checkpoints. That one cannot be removed takes nothing from the new one."""
        best = [self._folder / facts["best"][1]] if facts["best"] else []
        try:
            prune(self._folder, [*self._storage.valid_paths()[:keep], *best])
        except TrainerError as error:
            print_line(f"trainer: WARNING: {error}; the new one is saved", sys.stderr)


def _make_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="trainer-checkpoint")

"""Saver: takes snapshots of a rank's state, and has them committed on the ranks that write."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.disk.manifest import name_of
from trainer.checkpoint.disk.state_files import STATE
from trainer.checkpoint.run.snapshot import Buffers
from trainer.checkpoint.run.storage import Storage
from trainer.checkpoint.run.writer import Writer, missing_bytes
from trainer.cluster.output import print_line
from trainer.config import CheckpointConfig
from trainer.errors import TrainerError
from trainer.models.sharded import take_part

# The manifest, and what the file's format adds.
_OVERHEAD_BYTES = 1 << 20


class Saver:
    """One rank's part of saving. A rank that writes no file only keeps count.

    Args:
        attempt: number of this start of the training.
        facts: put into each manifest.
    """

    def __init__(self, config: CheckpointConfig, storage: Storage, attempt: int, facts: Mapping[str, Any]) -> None:
        kept = [] if config.resume in ("auto", "none") else [storage.folder / Path(config.resume).name]
        others = [name for name in storage.parts if name != storage.own_part] if storage.is_writer else []
        self.writer = Writer(storage.folder, config.keep, storage.damaged, kept, others)
        self.saved: tuple[int, int] | None = None
        """Epoch and update where the run was saved last."""
        self.best: tuple[float, str] | None = None
        """The best score, and the name of the checkpoint that has it."""
        self._config, self._storage, self._attempt, self._facts = config, storage, attempt, facts
        self._buffers, self._standby_buffers = (Buffers(keeps_parts=bool(storage.parts)) for _ in range(2))
        self._standby: dict[str, Any] | None = None
        self._full: TrainerError | None = None
        self._best_before: tuple[float, str] | None = None
        self._start = 0
        # A signal's thread commits the standby copy.
        self._lock = threading.Lock()

    def go_on(self, epoch: int, updates: int, best: tuple[float, str] | None) -> None:
        """Take over where an interrupted run was saved, and its best checkpoint."""
        self.saved, self.best, self._best_before, self._start = (epoch, updates), best, best, updates

    @property
    def is_busy(self) -> bool:
        return self.writer.is_busy

    @property
    def error(self) -> TrainerError | None:
        """Why this rank could not write the last checkpoint."""
        return self._full or self.writer.error

    def forget_error(self) -> None:
        """Count the last checkpoint as not saved."""
        self._full = self.writer.error = self.saved = None
        if not self._storage.is_writer:
            self.writer.written = None  # this rank's part of it has gone with the rest
        self.best = self._best_before

    def is_better(self, score: float | None) -> bool:
        """Return whether a score is better than all before."""
        if score is None or self._config.best is None or not math.isfinite(score):
            return False
        return self.best is None or (score < self.best[0] if self._config.best == "min" else score > self.best[0])

    def best_paths(self) -> list[Path]:
        """Return where the best checkpoint is, and the one that stays the best until that is committed."""
        return [self._storage.folder / best[1] for best in (self.best, self._best_before) if best is not None]

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a copy of the state for `save`; None where this rank does not write, or has saved it already.

        Collective where tensors are sharded and ranks do not write their parts: those that write get them whole.
        """
        if (state["epoch"], state["updates"]) == self.saved:
            return None
        if not self._storage.writes:
            take_part(state)
            return None
        self.writer.wait()
        return self._buffers.copy(state)

    def begin(self, place: tuple[int, int]) -> bool:
        """Return whether what was copied can be written, as far as this rank is to look; else there is an error."""
        if not self._storage.is_writer or place == self.saved:
            return True
        state_bytes = self._buffers.bytes
        if lacks := missing_bytes(self._storage.folder, state_bytes + _OVERHEAD_BYTES):
            self._full = TrainerError(
                f"a checkpoint of {_size(state_bytes)} does not fit into {self._storage.folder}: "
                f"{_size(lacks)} are missing"
            )
        return not lacks and self.writer.begin((self._attempt, *place))

    def save(
        self,
        place: tuple[int, int],
        snapshot: Mapping[str, Any] | None,
        *,
        has_begun: bool = True,
        score: float | None = None,
        is_complete: bool = False,
    ) -> None:
        """Start writing what `copy` has returned, unless the run was saved at this place already.

        Args:
            place: epoch and update.
            snapshot: None where this rank does not write.
            has_begun: whether `begin` went well, on all ranks where they write one checkpoint together.
            score: of the model, for the best one.
            is_complete: whether the training has reached its end.
        """
        if place == self.saved:
            return
        name, self._best_before = name_of(self._attempt, *place), self.best
        if score is not None and self.is_better(score):
            self.best = (score, name)
        self.saved = place
        if snapshot is None or not has_begun:
            return
        with self._lock:
            facts = self._describe(snapshot, score=score, is_complete=is_complete)
            files, best = self._files(snapshot, self._buffers), self.best[1] if self.best else None
            self.writer.start((self._attempt, *place), files, facts, best)

    def wait(self) -> None:
        """Return when nothing is being written."""
        self.writer.wait()

    def close(self) -> None:
        """Return when nothing is being written, and no thread is left."""
        self.writer.close()

    def take_standby(self, state: Mapping[str, Any]) -> None:
        """Copy the state, so that `commit_standby` can write it later. Collective as `copy` is."""
        if not self._storage.writes:
            take_part(state)
            return
        with self._lock:
            self._standby = self._standby_buffers.copy(state)

    def commit_standby(self, updates: int) -> bool:
        """Commit the standby copy where it is of the last update; return whether what is to be saved is committed.

        A rank that does not commit has its host's writer do so, whose end the launcher makes the job's.
        """
        if not self._storage.is_writer:
            self._storage.signal_writer()
        if not self._storage.writes:
            return False
        with self._lock:
            self.writer.wait()
            if updates in (0, self._start, self.writer.written[2] if self.writer.written else 0):
                return self._storage.is_writer
            state = self._standby
            if state is None or state["updates"] != updates:
                return False
            facts = self._describe(state, score=None, is_complete=False)
            best = self.best[1] if self.best else None
            files = self._files(state, self._standby_buffers)
            order = (self._attempt, state["epoch"], updates)
            self.writer.commit(order, files, facts, best, self._config.grace_s / 2)
        if self.error is not None and self._storage.is_writer:
            print_line(f"trainer: WARNING: {self.error}; earlier checkpoints are kept", sys.stderr)
        return self.error is None and self._storage.is_writer

    def check_room(self, state_bytes: int) -> str:
        """Return what the disk lacks for as many checkpoints as are kept, in words; "" where it has room."""
        if not self._storage.is_writer:
            return ""
        count = self._config.keep + 1 + (self._config.best is not None)
        each = state_bytes + _OVERHEAD_BYTES
        held = sum(file.stat().st_size for file in self._storage.folder.glob("attempt-*/*"))
        lacks = missing_bytes(self._storage.folder, each * count - held)
        return (
            f"{count} checkpoints of {_size(each)} do not fit into {self._storage.folder}: "
            f"{_size(lacks)} are missing; lower keep, or name another folder"
            if lacks
            else ""
        )

    def _files(self, snapshot: Mapping[str, Any], buffers: Buffers) -> dict[str, Any]:
        """Return what this rank writes of a snapshot."""
        whole = {STATE: snapshot} if self._storage.is_writer else {}
        return {**whole, self._storage.own_part: buffers.parts} if self._storage.own_part else whole

    def _describe(self, state: Mapping[str, Any], *, score: float | None, is_complete: bool) -> dict[str, Any]:
        return {
            **self._facts,
            "epoch": state["epoch"],
            "updates": state["updates"],
            "taken": [loader["taken"] for loader in state["loaders"]],
            "score": score,
            "best": self.best,
            "complete": is_complete,
            "resume": str(self._config.resume),
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }


def _size(count: float) -> str:
    """Format bytes, as in "1.19 MB"."""
    scale = min(int(math.log10(max(count, 1)) / 3), 3)
    return f"{count / 1000**scale:.3g} {('bytes', 'kB', 'MB', 'GB')[scale]}"

"""Saver: takes snapshots of a rank's state, and commits them in a thread beside the training, one at a time."""

from __future__ import annotations

import math
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.disk.commit import TIMEOUT_S, begin, commit, contribute, prune
from trainer.checkpoint.disk.committed import Order, find, name_of
from trainer.checkpoint.disk.state_files import STATE, read_state
from trainer.checkpoint.run.snapshot import Buffers
from trainer.checkpoint.run.storage import Storage
from trainer.cluster.output import print_line
from trainer.config import CheckpointConfig
from trainer.errors import TrainerError
from trainer.models.sharded import take_part

# The manifest, and what the file's format adds.
_OVERHEAD_BYTES = 1 << 20


class Saver:
    """One rank's part of saving. A rank that writes no file only keeps count.

    The newest `keep` checkpoints stay in the folder, and those that were damaged at the start do not count among them;
    the best one and the one that the run was started from stay as well.

    Args:
        attempt: number of this start of the training.
        facts: put into each manifest.
    """

    def __init__(self, config: CheckpointConfig, storage: Storage, attempt: int, facts: Mapping[str, Any]) -> None:
        self.saved: tuple[int, int] | None = None
        """Epoch and update where the run was saved last."""
        self.best: tuple[float, str] | None = None
        """The best score, and the name of the checkpoint that has it."""
        self.error: TrainerError | None = None
        """Why this rank could not write the last checkpoint."""
        self.seconds: list[float] = []
        """Time of each commit, beside the training."""
        self._config, self._storage, self._attempt, self._facts = config, storage, attempt, facts
        self._folder = storage.folder
        self._named = [] if config.resume in ("auto", "none") else [self._folder / Path(config.resume).name]
        self._others = [name for name in storage.parts if name != storage.own_part] if storage.is_writer else []
        self._buffers, self._standby_buffers = (Buffers(keeps_parts=bool(storage.parts)) for _ in range(2))
        self._standby: dict[str, Any] | None = None
        self._best_before: tuple[float, str] | None = None
        self._start = 0
        self._written: Order | None = None
        """The newest that this rank has committed, or written its part of."""
        self._has_checked = False
        # One thread for all: a new one for each snapshot would keep the training waiting until it runs. Python waits
        # for it, so that a script that ends lets it finish.
        self._pool = _make_pool()
        self._writing: Future[None] | None = None
        # A signal's thread commits the standby copy.
        self._lock = threading.Lock()

    def go_on(self, epoch: int, updates: int, best: tuple[float, str] | None) -> None:
        """Take over where an interrupted run was saved, and its best checkpoint."""
        self.saved, self.best, self._best_before, self._start = (epoch, updates), best, best, updates

    @property
    def is_busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def forget_error(self) -> None:
        """Count the last checkpoint as not saved."""
        self.error = self.saved = None
        if not self._storage.is_writer:
            self._written = None  # this rank's part of it has gone with the rest
        self.best = self._best_before

    def is_better(self, score: float | None) -> bool:
        """Return whether a score is better than all before."""
        if score is None or self._config.best is None or not math.isfinite(score):
            return False
        return self.best is None or (score < self.best[0] if self._config.best == "min" else score > self.best[0])

    def best_paths(self) -> list[Path]:
        """Return where the best checkpoint is, and the one that stays the best until that is committed."""
        return [self._folder / best[1] for best in (self.best, self._best_before) if best is not None]

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a copy of the state for `save`; None where this rank does not write, or has saved it already.

        Collective where tensors are sharded and ranks do not write their parts: those that write get them whole.
        """
        if (state["epoch"], state["updates"]) == self.saved:
            return None
        if not self._storage.writes:
            take_part(state)
            return None
        self.wait()
        return self._buffers.copy(state)

    def begin(self, place: tuple[int, int]) -> bool:
        """Return whether what was copied can be written, as far as this rank is to look; else there is an error."""
        if not self._storage.is_writer or place == self.saved:
            return True
        order, state_bytes = (self._attempt, *place), self._buffers.bytes
        try:
            if lacks := _missing_bytes(self._folder, state_bytes + _OVERHEAD_BYTES):
                raise TrainerError(
                    f"a checkpoint of {_size(state_bytes)} does not fit into {self._folder}: {_size(lacks)} are missing"
                )
            if self._others and self._written != order:
                begin(self._folder, name_of(*order))
        except TrainerError as error:
            self.error = error
            return False
        return True

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
            self.wait()
            facts = self._describe(snapshot, score=score, is_complete=is_complete)
            self._writing = self._pool.submit(self._commit, self._files(snapshot, self._buffers), facts)

    def wait(self) -> None:
        """Return when nothing is being written."""
        writing = self._writing  # a signal's thread waits for it as well
        if writing is not None:
            wait([writing])

    def close(self) -> None:
        """End the thread, once nothing is being written; `save` makes another one."""
        self._pool.shutdown()
        self._pool = _make_pool()

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
            self.wait()
            if updates in (0, self._start, self._written[2] if self._written else 0):
                return self._storage.is_writer
            state = self._standby
            if state is None or state["updates"] != updates:
                return False
            facts = self._describe(state, score=None, is_complete=False)
            self._commit(self._files(state, self._standby_buffers), facts, self._config.grace_s / 2)
        if self.error is not None and self._storage.is_writer:
            print_line(f"trainer: WARNING: {self.error}; earlier checkpoints are kept", sys.stderr)
        return self.error is None and self._storage.is_writer

    def check_room(self, state_bytes: int) -> str:
        """Return what the disk lacks for as many checkpoints as are kept, in words; "" where it has room."""
        if not self._storage.is_writer:
            return ""
        count = self._config.keep + 1 + (self._config.best is not None)
        each = state_bytes + _OVERHEAD_BYTES
        held = sum(file.stat().st_size for file in self._folder.glob("attempt-*/*"))
        lacks = _missing_bytes(self._folder, each * count - held)
        return (
            f"{count} checkpoints of {_size(each)} do not fit into {self._folder}: "
            f"{_size(lacks)} are missing; lower keep, or name another folder"
            if lacks
            else ""
        )

    def _files(self, snapshot: Mapping[str, Any], buffers: Buffers) -> dict[str, Any]:
        """Return what this rank writes of a snapshot."""
        whole = {STATE: snapshot} if self._storage.is_writer else {}
        return {**whole, self._storage.own_part: buffers.parts} if self._storage.own_part else whole

    def _commit(self, files: Mapping[str, Any], facts: Mapping[str, Any], alone_s: float = 0.0) -> None:
        """Commit a snapshot, or write this rank's part of it; `error` says whether that went well.

        Args:
            files: what is written to each file, in PyTorch's own format. Without `STATE`, another rank commits it.
            facts: put into the manifest.
            alone_s: seconds to wait for other ranks' files, where these ranks have not agreed to save.
        """
        order = (self._attempt, facts["epoch"], facts["updates"])
        if self._written == order:
            return  # saved again, because another host could not write it
        started = time.monotonic()
        try:
            self._write(name_of(*order), files, facts, alone_s)
            self._written, self.error = order, None
            if STATE in files:
                self._prune(facts["best"])
        except TrainerError as error:
            self.error = error
        except Exception as error:  # such as a MemoryError: nobody else would be told of it
            self.error = TrainerError(f"the checkpoint cannot be written: {type(error).__name__}: {error}")
        self.seconds.append(time.monotonic() - started)

    def _write(self, name: str, files: Mapping[str, Any], facts: Mapping[str, Any], alone_s: float) -> None:
        writes = {file: partial(torch.save, content) for file, content in files.items()}
        if STATE not in files:
            for file, write in writes.items():
                contribute(self._folder, name, file, write, begins_within_s=alone_s)
            return
        commit(
            self._folder,
            name,
            writes,
            facts,
            # A checkpoint that cannot be loaded is found at the first one.
            check=None if self._has_checked else _load_as_data,
            is_begun=bool(self._others) and not alone_s,
            others=self._others,
            timeout_s=alone_s or TIMEOUT_S,
        )
        self._has_checked = True

    def _prune(self, best: tuple[float, str] | None) -> None:
        valid = [path for path in find(self._folder) if path not in self._storage.damaged]
        kept = [self._folder / best[1]] if best else []
        prune(self._folder, [*valid[: self._config.keep], *self._named, *kept])

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


def _make_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="trainer-checkpoint")


def _load_as_data(folder: Path) -> None:
    try:
        read_state(folder, is_mapped=True)
    except Exception as error:
        raise TrainerError(f"the checkpoint cannot be loaded as data ({error})") from None


def _missing_bytes(folder: Path, needed: int) -> int:
    """Return how many bytes the disk lacks for `needed` more; 0 where it has them."""
    return max(0, needed - shutil.disk_usage(folder).free)


def _size(count: float) -> str:
    """Format bytes, as in "1.19 MB"."""
    scale = min(int(math.log10(max(count, 1)) / 3), 3)
    return f"{count / 1000**scale:.3g} {('bytes', 'kB', 'MB', 'GB')[scale]}"

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

from trainer.checkpoint.disk.commit import TIMEOUT_S, OthersFailedError, begin, commit, contribute, prune
from trainer.checkpoint.disk.committed import Committed, Order, find, name_of
from trainer.checkpoint.disk.state_files import STATE, read_state
from trainer.checkpoint.run.snapshot import Snapshot
from trainer.checkpoint.run.storage import Storage
from trainer.cluster.output import print_line
from trainer.config import CheckpointConfig
from trainer.errors import ConfigError, TrainerError, name_rank
from trainer.loop.random_numbers import random_state
from trainer.models.sharded import take_part
from trainer.strategies.base import Strategy

# The manifest, and what the file's format adds.
_OVERHEAD_BYTES = 1 << 20


class Saver:
    """One rank's part of saving. A rank that writes no file only keeps count.

    The newest `keep` checkpoints stay in the folder, and those that were damaged at the start do not count among them;
    the best one and the one that the run was started from stay as well.

    Args:
        attempt: number of this start of the training.
        facts: put into each manifest.
        resumed: the checkpoint that the run goes on from; None where it starts anew.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        storage: Storage,
        strategy: Strategy,
        attempt: int,
        facts: Mapping[str, Any],
        resumed: Committed | None = None,
    ) -> None:
        self.saved = resumed.order[1:] if resumed else None
        """Epoch and update where the run was saved last."""
        self.error: TrainerError | None = None
        """Why this rank could not write the last checkpoint."""
        self.seconds: list[float] = []
        """Time of each commit, beside the training."""
        self._config, self._storage, self._strategy = config, storage, strategy
        self._attempt, self._facts, self._folder = attempt, facts, storage.folder
        best = resumed.facts["best"] if resumed else None
        self._best: tuple[float, str] | None = tuple(best) if best else None
        """The best score, and the name of the checkpoint that has it."""
        self._best_before = self._best
        self._start = resumed.order[2] if resumed else 0
        self.is_complete = resumed is not None and bool(resumed.facts["complete"])
        """Whether the newest checkpoint is that of the end of the training."""
        self._has_warned = False
        self._named = [] if config.resume in ("auto", "none") else [self._folder / Path(config.resume).name]
        self._others = [name for name in storage.parts if name != storage.part] if storage.is_writer else []
        self._snapshot, self._standby = (Snapshot(keeps_parts=bool(storage.parts)) for _ in range(2))
        self._written: Order | None = None
        """The newest checkpoint that this rank has committed, or has written its part of."""
        self._has_checked = False
        # One thread for all: a new one for each snapshot would keep the training waiting until it runs. Python waits
        # for it, so that a script that ends lets it finish.
        self._pool = _make_pool()
        self._writing: Future[None] | None = None
        # A signal's thread commits the standby copy.
        self._lock = threading.Lock()

    @property
    def is_busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def is_better(self, score: float | None) -> bool:
        """Return whether a score is better than all before."""
        if score is None or self._config.best is None or not math.isfinite(score):
            return False
        return self._best is None or (score < self._best[0] if self._config.best == "min" else score > self._best[0])

    def best_path(self) -> Path | None:
        """Return where the best checkpoint is: until it is committed, the one that was the best before."""
        paths = (self._folder / best[1] for best in (self._best, self._best_before) if best is not None)
        return next((path for path in paths if path.is_dir()), None)

    def save(
        self, state: Mapping[str, Any], *, score: float | None = None, is_complete: bool = False, again: bool = False
    ) -> None:
        """Copy the state and start writing it, unless the run was saved at the same place already. Collective.

        Args:
            state: with the live tensors, and `epoch`, `updates` and `loaders`.
            score: of the model, for the best one.
            is_complete: whether the training has reached its end.
            again: save also at the same place, under the name of another attempt: what a script has changed since.
        """
        place = (state["epoch"], state["updates"])
        if place == self.saved:
            if not again:
                return
            self._attempt += 1
        self.wait()
        self._copy(state, self._snapshot)
        has_begun = self._begin((self._attempt, *place))
        # After the copy, because this waits for the slowest rank.
        random_states = self._gather_random_states()
        if self._storage.parts:
            has_begun = all(self._strategy.all_gather_object(has_begun))
        self._best_before = self._best
        if score is not None and self.is_better(score):
            self._best = (score, name_of(self._attempt, *place))
        self.saved, self.is_complete = place, is_complete
        if self._storage.writes and has_begun:
            self._snapshot.state["random"] = random_states
            with self._lock:
                self.wait()
                facts = self._describe(self._snapshot, score=score, is_complete=is_complete)
                self._writing = self._pool.submit(self._commit, self._snapshot, facts)

    def wait(self) -> None:
        """Return when nothing is being written. Several threads may wait."""
        if self._writing is not None:
            wait([self._writing])

    def take_problem(self) -> str:
        """Return why a rank could not write, and count the last checkpoint as not saved then; else "". Collective.

        A rank that has waited for another one in vain does not know the reason, so one that does is asked first.
        """
        if self._storage.parts:
            self.wait()  # for the rank that knows the reason; all of them give up soon
        world = self._strategy.world
        named = name_rank(str(self.error), world.rank, world.size, world.host)
        here = (isinstance(self.error, OthersFailedError), named) if self.error else None
        _, problem = min(filter(None, self._strategy.all_gather_object(here)), default=(False, ""))
        if problem:
            self.error = self.saved = None
            self._best = self._best_before
            if not self._storage.is_writer:
                self._written = None  # this rank's part of it has gone with the rest
        return problem

    def close(self) -> None:
        """End the thread, once nothing is being written; `save` makes another one."""
        self._pool.shutdown()
        self._pool = _make_pool()

    def take_standby(self, state: Mapping[str, Any]) -> None:
        """Copy the state, so that `commit_standby` can write it later. Collective."""
        random_states = self._gather_random_states()
        with self._lock:
            self._copy({**state, "random": random_states}, self._standby)

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
            if self._standby.state.get("updates") != updates:
                return False
            self._commit(self._standby, self._describe(self._standby), self._config.grace_s / 2)
        if self.error is not None and self._storage.is_writer:
            print_line(f"trainer: WARNING: {self.error}; earlier checkpoints are kept", sys.stderr)
        return self.error is None and self._storage.is_writer

    def check_room(self, state_bytes: int) -> None:
        """Raise `ConfigError` on every rank if a host's disk has no room for the checkpoints to keep. Collective."""
        problem = ""
        if self._storage.is_writer:
            count = self._config.keep + 1 + (self._config.best is not None)
            each = state_bytes + _OVERHEAD_BYTES
            held = sum(file.stat().st_size for file in self._folder.glob("attempt-*/*"))
            if lacks := self._missing_bytes(each * count - held):
                problem = (
                    f"{count} checkpoints of {_size(each)} do not fit into {self._folder}: {_size(lacks)} are missing; "
                    "lower keep, or name another folder"
                )
        self._storage.raise_together(problem, ConfigError)

    def _copy(self, state: Mapping[str, Any], snapshot: Snapshot) -> None:
        """Copy the state if this rank writes.

        Collective where tensors are sharded and ranks do not write their parts: those that write get them whole.
        """
        if self._storage.writes:
            snapshot.copy(state)
        else:
            take_part(state)

    def _gather_random_states(self) -> list[dict[str, Any]]:
        return self._strategy.all_gather_object(random_state(self._strategy.world.device))

    def _begin(self, order: Order) -> bool:
        """Return whether this rank can write what was copied; if not, `error` says why."""
        if not self._storage.is_writer:
            return True
        try:
            size = self._snapshot.bytes
            if lacks := self._missing_bytes(size + _OVERHEAD_BYTES):
                raise TrainerError(
                    f"a checkpoint of {_size(size)} does not fit into {self._folder}: {_size(lacks)} are missing"
                )
            if self._others and self._written != order:
                begin(self._folder, name_of(*order))
        except TrainerError as error:
            self.error = error
            return False
        return True

    def _missing_bytes(self, needed: int) -> int:
        """Return how many bytes the disk lacks for `needed` more; 0 where it has them."""
        return max(0, needed - shutil.disk_usage(self._folder).free)

    def _describe(self, snapshot: Snapshot, *, score: float | None = None, is_complete: bool = False) -> dict[str, Any]:
        """Return what the manifest says of a snapshot."""
        return {
            **self._facts,
            "epoch": snapshot.state["epoch"],
            "updates": snapshot.state["updates"],
            "taken": [loader["taken"] for loader in snapshot.state["loaders"]],
            "score": score,
            "best": self._best,
            "complete": is_complete,
            "resume": str(self._config.resume),
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }

    def _commit(self, snapshot: Snapshot, facts: Mapping[str, Any], alone_s: float = 0.0) -> None:
        """Commit a snapshot, or write this rank's part of it; `error` says whether that went well.

        Args:
            facts: put into the manifest.
            alone_s: seconds to wait for other ranks' files, where these ranks have not agreed to save.
        """
        order = (self._attempt, facts["epoch"], facts["updates"])
        if self._written == order:
            return  # saved again, because another host could not write it
        started = time.monotonic()
        try:
            self._write(name_of(*order), snapshot, facts, alone_s)
            self._written, self.error = order, None
        except TrainerError as error:
            self.error = error
        except Exception as error:  # such as a MemoryError: nobody else would be told of it
            self.error = TrainerError(f"the checkpoint cannot be written: {type(error).__name__}: {error}")
        if self.error is None and self._storage.is_writer:
            self._prune(facts)
        self.seconds.append(time.monotonic() - started)

    def _prune(self, facts: Mapping[str, Any]) -> None:
        """Remove old checkpoints. That one cannot be removed is told once, and takes nothing from the new one."""
        try:
            valid = [path for path in find(self._folder) if path not in self._storage.damaged]
            best = [self._folder / facts["best"][1]] if facts["best"] else []
            prune(self._folder, [*valid[: self._config.keep], *self._named, *best])
        except TrainerError as error:
            if not self._has_warned:
                print_line(f"trainer: WARNING: {error}; the new one is saved", sys.stderr)
            self._has_warned = True

    def _write(self, name: str, snapshot: Snapshot, facts: Mapping[str, Any], alone_s: float) -> None:
        part = {self._storage.part: partial(torch.save, snapshot.parts)} if self._storage.part else {}
        if not self._storage.is_writer:
            for file, write in part.items():
                contribute(self._folder, name, file, write, begins_within_s=alone_s)
            return
        commit(
            self._folder,
            name,
            {STATE: partial(torch.save, snapshot.state), **part},
            facts,
            # A checkpoint that cannot be loaded is found at the first one.
            check=None if self._has_checked else partial(read_state, is_mapped=True),
            is_begun=bool(self._others) and not alone_s,
            others=self._others,
            timeout_s=alone_s or TIMEOUT_S,
        )
        self._has_checked = True


def _make_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="trainer-checkpoint")


def _size(count: float) -> str:
    """Format bytes, as in "1.19 MB"."""
    scale = min(int(math.log10(max(count, 1)) / 3), 3)
    return f"{count / 1000**scale:.3g} {('bytes', 'kB', 'MB', 'GB')[scale]}"

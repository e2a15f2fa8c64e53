"""Saver: takes snapshots of a rank's state, and commits them in a thread beside the training, one at a time."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.disk.commit import OthersFailedError, begin, commit, contribute, prune
from trainer.checkpoint.disk.committed import Committed, Order, find, name_of
from trainer.checkpoint.disk.state_files import STATE, read_state
from trainer.checkpoint.run.snapshot import Snapshot
from trainer.checkpoint.run.storage import Storage
from trainer.cluster.output import print_line
from trainer.config import CheckpointConfig
from trainer.errors import TrainerError, name_rank
from trainer.loop.random_numbers import random_state
from trainer.models.sharded import take_part
from trainer.strategies.base import Strategy


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
        self._snapshot = Snapshot(keeps_parts=bool(storage.parts))
        self._written: Order | None = None
        """The newest checkpoint that this rank has committed, or has written its part of."""
        self._has_checked = False
        # One thread for all: a new one for each snapshot would keep the training waiting until it runs. Python waits
        # for it, so that a script that ends lets it finish.
        self._pool = _make_pool()
        self._writing: Future[None] | None = None

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
        self.copy(state)
        has_begun = self._begin((self._attempt, *place))
        # After the copy, because this waits for the slowest rank.
        gathered = self._strategy.all_gather_object((random_state(self._strategy.world.device), has_begun))
        self._best_before = self._best
        if score is not None and self.is_better(score):
            self._best = (score, name_of(self._attempt, *place))
        self.saved, self.is_complete = place, is_complete
        if self._storage.writes and all(has_begun for _, has_begun in gathered):
            self._snapshot.state["random"] = [state for state, _ in gathered]
            self._writing = self._pool.submit(self._commit, self._describe(score, is_complete=is_complete))

    def wait(self) -> None:
        """Return when nothing is being written."""
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

    def has_written(self, updates: int) -> bool:
        """Return whether this rank has nothing to write after so many updates, so that its end loses none of them."""
        is_last = updates in (0, self._start, self._written[2] if self._written else 0)
        return self._storage.is_writer and not self.is_busy and is_last

    def copy(self, state: Mapping[str, Any]) -> None:
        """Copy the state if this rank writes; raises as `Snapshot.copy`.

        Collective where tensors are sharded and ranks do not write their parts: those that write get them whole.
        """
        if self._storage.writes:
            self._snapshot.copy(state)
        else:
            take_part(state)

    def _begin(self, order: Order) -> bool:
        """Return whether ranks can write their parts of what was copied; if not, `error` says why."""
        if self._others and self._written != order:
            try:
                begin(self._folder, name_of(*order))
            except TrainerError as error:
                self.error = error
                return False
        return True

    def _describe(self, score: float | None, *, is_complete: bool) -> dict[str, Any]:
        """Return what the manifest says of the snapshot."""
        state = self._snapshot.state
        return {
            **self._facts,
            "epoch": state["epoch"],
            "updates": state["updates"],
            "taken": [loader["taken"] for loader in state["loaders"]],
            "score": score,
            "best": self._best,
            "complete": is_complete,
            "resume": str(self._config.resume),
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }

    def _commit(self, facts: Mapping[str, Any]) -> None:
        """Commit the snapshot, or write this rank's part of it; `error` says whether that went well."""
        order = (self._attempt, facts["epoch"], facts["updates"])
        if self._written == order:
            return  # saved again, because another host could not write it
        started = time.monotonic()
        try:
            self._write(name_of(*order), facts)
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
            check=None if self._has_checked else partial(read_state, is_mapped=True),
            others=self._others,
        )
        self._has_checked = True


def _make_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="trainer-checkpoint")

"""Checkpoints: save a run while it trains, and resume where an interrupted run stopped.

Every rank calls the following collectives in this order; threads call none, neither that which writes nor that which
waits for a signal.

1. At the start, `check_consistency` compares the settings. `Storage` broadcasts the job's id; rank 0 locks the folder,
   then the first rank of each other host; the ranks gather who writes. Here and in 2, they gather after each work on
   the disk what has failed, so that all of them raise it.
2. `Storage.find_start` gathers what each writer has found as its newest checkpoint. All choose the same one, and gather
   whether a writer lacks it. If so, a rank that has it broadcasts its files in chunks. Then each rank reads the files
   alone. If there is no checkpoint, `Storage.copy` copies the state as in 4.
3. After the same updates, about twice a second, and at the end of each epoch, `FlagReduction` sums who has had a
   signal, whether it is time, who is writing, and who could not. At the end of an epoch, rank 0 broadcasts the score
   before.
4. If a checkpoint is due, `check_states` gathers hashes of the ranks' weights. `Contents.state` calls each
   `state_dict`, which may be collective. `Storage.copy` gathers sharded tensors, unless the ranks write parts. Then the
   ranks gather the random states.
5. If a rank could not write, and after each save that is waited for, they gather why.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch.profiler import record_function

from trainer.checkpoint.disk.committed import name_of
from trainer.checkpoint.run.contents import Contents
from trainer.checkpoint.run.positions import Positions
from trainer.checkpoint.run.preemption import Preemption
from trainer.checkpoint.run.storage import Storage, gather_problem
from trainer.cluster import exit_codes
from trainer.cluster.output import print_line
from trainer.config import CheckpointConfig
from trainer.data.base import Loader, Observer
from trainer.errors import ConfigError, TrainerError
from trainer.loop.consistency import check_consistency, check_states
from trainer.loop.random_numbers import random_state, set_random_state
from trainer.strategies.base import Strategy
from trainer.watch.heartbeat import PREEMPTED, report_phase
from trainer.watch.spans import CHECKPOINT

_DEFAULT_EVERY_S = 600.0
_REDUCE_EVERY_S = 0.5
_REDUCE_WITHIN_UPDATES = 128


class Checkpoints(Observer):
    """The checkpoints of a run: when it is saved, and where it resumes. `Run.checkpoints` returns this.

    A run is saved only while no batch is in use: between two updates, or between two epochs. If a loop iterates over
    several loaders at once, this is when the loader whose pass began first is asked for its next batch.

    Attributes:
        resumed: what this run has resumed from; None for a new run.
        attempt: number of this start, from 1.
        updates: updates so far, those of earlier starts included.

    Args:
        contents: what is saved.
        facts: written into each manifest: the run's settings, versions and world.

    Raises:
        ConfigError: the checkpoint to resume from does not fit the run.
        TrainerError: the folder cannot be written, or is in use; or the state cannot be loaded again as data.
    """

    def __init__(self, config: CheckpointConfig, strategy: Strategy, contents: Contents, facts: dict[str, Any]) -> None:
        self.config, self._strategy, self._world = config, strategy, strategy.world
        self._contents, self._facts = contents, facts
        check_consistency(strategy, {f"checkpoints' {name}": value for name, value in config.as_dict().items()})
        self._storage = Storage(Path(config.folder), strategy)
        try:
            checkpoint = self._storage.find_start()
            resumed = self.resumed = contents.resume(checkpoint, strategy) if checkpoint else None
            if resumed is None:  # what cannot be saved is told before the first step
                self._storage.copy(contents.state())
        except BaseException:
            self._storage.close()
            raise
        self.attempt = self._attempt = self._storage.attempt
        self.updates, self.epoch = (resumed.updates, resumed.epoch) if resumed else (0, 0)
        self._saved = (self.epoch, self.updates) if resumed else None
        """Epoch and update where the run was saved last."""
        self.stalls_s: list[float] = []
        """Seconds for which each checkpoint has kept this rank from training."""
        self.writes_s = self._storage.seconds
        """Seconds that each commit took in the background, on a rank that writes."""
        self._positions = Positions(resumed.positions if resumed else (), resumed.saved_in if resumed else None)
        self._flags = FlagReduction(strategy, self.updates)
        has_counts = config.every_updates or config.every_epochs
        self._every_s = config.every_s or (math.inf if has_counts else _DEFAULT_EVERY_S)
        self._saved_at = time.monotonic()
        self._is_postponed = self._is_stopping = self._is_ending = self._is_failing = False
        self._score: float | None = None
        best = checkpoint.facts["best"] if checkpoint else None
        self._best: tuple[float, str] | None = tuple(best) if best else None
        """The best score, and the name of the checkpoint that has it."""
        self._best_before = self._best
        self.preemption = Preemption(self._is_saved, config.grace_s)

    @property
    def newest_path(self) -> Path | None:
        """The newest committed checkpoint in the folder, None before the first.

        Each rank looks at its host's disk, on which a checkpoint may appear a moment later than on another host's.
        After `save` and the loop over `run.epochs`, all ranks see the same one.
        """
        return next(iter(self._storage.valid_paths()), None)

    @property
    def best_path(self) -> Path | None:
        """The committed checkpoint with the best score, None before the first or where `best` is not set.

        When all ranks see the same one is as for `newest_path`.
        """
        paths = (self._storage.folder / best[1] for best in (self._best, self._best_before) if best)
        return next((path for path in paths if path.is_dir()), None)

    def rate(self, score: float) -> None:
        """Report the model's current score, the same on every rank. The setting `best` says which scores are better.

        If it is the best so far, a checkpoint is made at the end of the epoch, and kept.

        Raises:
            ConfigError: `best` was not set.
        """
        if self.config.best is None:
            raise ConfigError(
                "rate needs best, which says whether lower or higher scores are better; set it to min or max"
            )
        self._score = float(score)

    def save(self) -> None:
        """Save after the current batch's update; or, between two passes, save at once and return when it is committed.

        `run.epochs` saves after its last epoch; if you leave its loop earlier, call this. Collective.

        Raises:
            TrainerError: it cannot be written; raised on every rank.
        """
        if self._positions.first is not None:
            self._is_postponed = True
        elif problem := self._save_now():
            raise TrainerError(problem)

    def watch(self, loader: Loader) -> None:
        """Also save the position of this training loader, and have it resume where it stopped."""
        self._positions.watch(loader)
        loader.observers = [each for each in loader.observers if not isinstance(each, Checkpoints)] + [self]

    def count(self, epochs: range) -> Iterator[int]:
        """Yield the numbers of the remaining epochs, and save between them when a checkpoint is due.

        Raises:
            ConfigError: the run counts epochs for the second time.
        """
        if self._positions.has_begun:
            raise ConfigError(
                "checkpoints belong to one loop over run.epochs, and this is the second; call run.checkpoints with a "
                "folder of its own before each"
            )
        self._positions.begin()
        if self._world.is_root and self._contents.lacks_schedule:
            print_line(
                "trainer: WARNING: the learning rate has a scheduler that is not in the state of run.checkpoints; "
                'after an interruption it begins anew, so give state={"schedule": scheduler}',
                sys.stderr,
            )
        return self._count(range(self.epoch, epochs.stop) if self.resumed else epochs)

    def _count(self, epochs: range) -> Iterator[int]:
        for epoch in epochs:
            self.epoch = epoch
            if epoch > epochs.start:
                self._positions.begin_epoch()
                self._after_epoch()
            elif self.resumed is not None and self.resumed.saved_in is None:
                self._restore_random_state()
            yield epoch
        self.epoch = max(self.epoch, epochs.stop)
        self._positions.begin_epoch()  # if the run is resumed for more epochs, none of the next one's passes are done
        if (self.epoch, self.updates) != self._saved:
            self._report(self._save_now())

    def begun(self, loader: Loader, *, is_resumed: bool) -> None:
        """Note that a pass over a loader begins."""
        if is_resumed and self._positions.was_saved_in(loader):
            self._restore_random_state()
        self._positions.begin_pass(loader)

    def updated(self, loader: Loader) -> None:
        """Note an update, and save if a checkpoint is due."""
        if not self._counts(loader):
            return
        self.updates += 1
        is_due = self._is_postponed or self.updates % (self.config.every_updates or sys.maxsize) == 0
        if self._flags.is_due(self.updates):
            is_due |= self._reduce_flags()
        if is_due or self._is_stopping:
            self._is_postponed = not self._contents.prepared.is_between_updates()
            if not self._is_postponed:
                self._save_or_end()

    def ended(self, loader: Loader, *, was_left: bool) -> None:
        """Note that a pass has ended; `was_left` if its loop was left early, after an update."""
        self.updates += was_left and self._positions.has_begun and loader is self._positions.first
        self._positions.end_pass(loader)

    def _counts(self, loader: Loader) -> bool:
        """Return whether this pass belongs to the training, and is not nested in another one."""
        if self._positions.has_begun:
            return loader is self._positions.first
        if self._contents.prepared.backwards:
            raise TrainerError("run.checkpoints needs the epochs to be counted: for epoch in run.epochs(n)")
        return False  # a pass before the training, for statistics of the data say

    def close(self) -> None:
        """Wait for writes in progress, restore the signals' handlers, and release the folder."""
        self._storage.close()
        self.preemption.close()

    def _after_epoch(self) -> None:
        if self.config.best is not None:  # rank 0's counts: the ranks' may differ
            self._score = self._strategy.broadcast_object(self._score)
        is_due = self._reduce_flags() or self.epoch % (self.config.every_epochs or sys.maxsize) == 0
        if is_due or self._is_stopping or self._is_better(self._score):
            self._save_or_end()

    def _is_better(self, score: float | None) -> TypeGuard[float]:
        if score is None or not math.isfinite(score):
            return False
        return self._best is None or (score < self._best[0] if self.config.best == "min" else score > self._best[0])

    def _reduce_flags(self) -> bool:
        """Return whether all ranks are to save now; note whether they are to end. Collective."""
        is_time = time.monotonic() - self._saved_at >= self._every_s
        flags = [
            self.preemption.received is not None,
            is_time and self._world.is_root,
            self._storage.is_busy,
            self._storage.error is not None,
        ]
        stopping, due, busy, failed = self._flags.add_up(self.updates, flags)
        if failed:
            self._report(self._take_problem())
        elif not busy and self._saved is not None:
            self._is_failing = False
        self._is_stopping |= bool(stopping)
        return bool(due and not busy)

    def _save_or_end(self) -> None:
        if not self._is_stopping:
            self._save()
            return
        if (self.epoch, self.updates) != self._saved:
            self._save()
        problem, received = self._take_problem(), self.preemption.received
        which = received.name if received else "a signal on another rank"
        if problem:
            raise TrainerError(f"{problem}; {which} ends the job without its latest updates")
        if self._world.is_root:
            print_line(f"trainer: {which}: saved; start again to go on", sys.stderr)
        self._is_ending = True
        report_phase(PREEMPTED)
        raise SystemExit(exit_codes.PREEMPTED)

    def _report(self, problem: str) -> None:
        if problem and self.config.on_error == "stop":
            raise TrainerError(f"{problem}; earlier checkpoints are kept")
        if problem and self._world.is_root and not self._is_failing:  # one warning for a series of failures
            line = f"trainer: WARNING: {problem}; earlier checkpoints are kept, and the training goes on"
            print_line(line, sys.stderr)
        self._is_failing |= bool(problem)

    def _save(self) -> None:
        """Copy the state between two updates, and begin to write it. Collective."""
        report_phase("saving")
        started = time.monotonic()
        score, self._score = self._score, None
        place = (self.epoch, self.updates)
        if place == self._saved:
            self._attempt += 1  # another name, for what the script has changed since
        order = (self._attempt, *place)
        with record_function(CHECKPOINT):
            self._storage.wait()
            self._check_ranks()
            positions = self._positions.state()
            counts = {"epoch": self.epoch, "updates": self.updates}
            self._storage.copy({**self._contents.state(), **counts, **positions}, order)
            # After the copy, because this waits for the slowest rank.
            random = self._strategy.all_gather_object(random_state(self._world.device))
            self._saved, self._best_before = place, self._best
            if self._is_better(score):
                self._best = (score, name_of(*order))
            facts = {
                **self._facts,
                **counts,
                "taken": [loader["taken"] for loader in positions["loaders"]],
                "score": score,
                "best": self._best,
                "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            }
            self._storage.commit(order, random, facts, self.config.keep)
        self._saved_at = time.monotonic()
        self.stalls_s.append(self._saved_at - started)

    def _check_ranks(self) -> None:
        """Check that all ranks would save the same: else a run goes on from what a faulty memory has changed.

        Raises:
            TrainerError: a rank has other weights, or another state of an optimizer.
        """
        prepared, strategy = self._contents.prepared, self._strategy
        equal = all(synchronizer.weights_are_equal for synchronizer in prepared.synchronizers)
        if equal and self._world.size > 1 and not strategy.shards:
            optimizers = {known.number: optimizer for optimizer, known in prepared.optimizers.items()}
            agreed = f"that of update {self._saved[1]}" if self._saved else "none"
            when = f"after update {self.updates} (the last checkpoint on which all ranks agreed: {agreed})"
            check_states(strategy, prepared.numbered_models, optimizers, when)

    def _save_now(self) -> str:
        """Save, and wait until it is written; return what failed on any rank, or "". Collective."""
        self._save()
        return self._take_problem()

    def _take_problem(self) -> str:
        """Wait until all is written. If a rank could not, count it as not saved and return why; else "". Collective."""
        self._storage.wait()
        if (problem := gather_problem(self._strategy, self._storage.error)) is None:
            return ""
        self._storage.error, self._saved, self._best = None, None, self._best_before
        return str(problem)

    def _restore_random_state(self) -> None:
        """Restore this rank's random state, once, so that it draws what the interrupted run would have drawn."""
        if self.resumed is not None and self.resumed.random is not None:
            set_random_state(self.resumed.random, self._world.device)
            self.resumed.random = None

    def _is_saved(self) -> bool:
        """Return whether this rank has written all updates, as in an evaluation after the end of the training."""
        is_written = (
            self._storage.is_writer and not self._storage.is_busy and self.updates in (0, self._storage.written[2])
        )
        return self._is_ending or (self._positions.first is None and is_written)


class FlagReduction:
    """Sums of the ranks' flags, about twice a second: an all-reduce after each update would cost too much.

    All ranks call `add_up` after the same updates, which they count alike. Each sum also tells them when the next one
    is due, in updates, which rank 0 computes from its clock.
    """

    def __init__(self, strategy: Strategy, update: int) -> None:
        self._strategy = strategy
        self._last, self._next, self._summed_at = update, update + 1, time.monotonic()

    def is_due(self, update: int) -> bool:
        """Return whether `add_up` has to be called after this update, the same on every rank."""
        return update >= self._next

    def add_up(self, update: int, flags: Sequence[bool]) -> list[int]:
        """Return on how many ranks each flag is set. Collective."""
        world, now = self._strategy.world, time.monotonic()
        # Without an update in between, the elapsed time does not say how long an update takes.
        update_s = (now - self._summed_at) / (update - self._last) if update > self._last else _REDUCE_EVERY_S
        until_next = min(max(int(_REDUCE_EVERY_S / max(update_s, 1e-6)), 1), _REDUCE_WITHIN_UPDATES)
        sums = torch.tensor([*flags, until_next * world.is_root], dtype=torch.float64, device=world.device)
        *counts, until_next = map(round, self._strategy.all_reduce(sums).tolist())
        self._last, self._next, self._summed_at = update, update + until_next, now
        return counts

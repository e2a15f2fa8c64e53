"""Exchange: makes the gradients of backward passes the mean over all ranks, and tells ranks that have parted."""

from __future__ import annotations

import weakref
from collections.abc import Collection

import torch
from torch.optim import Optimizer

from trainer.loop.batches import Batches
from trainer.loop.consistency import PeriodicCheck
from trainer.loop.loss_scaler import LossScaler
from trainer.loop.prepared import Prepared, PreparedOptimizer
from trainer.loop.random_numbers import warn_of_twins
from trainer.strategies.base import Strategy
from trainer.strategies.gradients import Synchronizer
from trainer.watch.heartbeat import UpdateCounter


class Exchange:
    """The exchanges of one `Run`'s prepared models, and what follows each of them."""

    def __init__(self, strategy: Strategy, prepared: Prepared, batches: Batches, scaler: LossScaler | None) -> None:
        self._strategy, self._prepared, self._batches, self._scaler = strategy, prepared, batches, scaler
        self._periodic = PeriodicCheck(strategy)
        self._stepped: weakref.WeakKeyDictionary[Synchronizer, set[int]] = weakref.WeakKeyDictionary()
        """By id, the optimizers that have stepped since the last exchange of a model's gradients."""
        self.completed = UpdateCounter()
        self.had_no_sync = False
        """Whether a pass since the last exchange was one within `no_sync`."""

    def run(self, wanted: Collection[Synchronizer], *, failed: bool = False) -> None:
        """Make the gradients of the models that a pass has reached the mean over all ranks. Collective.

        Ranks may have reached different models, which they tell each other where there are several.

        Args:
            wanted: what synchronizes the models that were reached on this rank.
            failed: whether the pass has ended in an error, so that this rank's gradients are of no use.
        """
        alive = [held() for held in self._prepared.active]
        together = alive
        if len(alive) > 1 and not self._strategy.shards:
            is_wanted = [float(synchronizer in wanted) for synchronizer in alive]
            mask = torch.tensor(is_wanted, device=self._strategy.world.device)
            counts = self._strategy.send_gradients(mask, f"reached.{len(alive)}").tolist()
            together = [synchronizer for synchronizer, count in zip(alive, counts, strict=True) if count > 0]
        for synchronizer in together:
            if synchronizer is not None:
                synchronizer.discard() if failed else synchronizer.complete()
                self._stepped[synchronizer] = set()
        if self._scaler is not None:
            self._scaler.unscale(self._prepared.optimizers)
        if not self._prepared.has_optimizers:
            self.completed.on_step(self._batches.has_loader)
        if self._prepared.active and self._periodic.is_due():
            self._compare()
        self.had_no_sync = False

    def run_before_step(self, known: PreparedOptimizer, optimizer: Optimizer, *, is_repeated: bool) -> None:
        """Exchange what a step needs and has not got. Collective where that is so on any rank.

        This rank has kept its gradients, or takes no part in a pass of others, who step on the same models.

        Args:
            is_repeated: whether no backward pass of this rank came since the optimizer's last step.
        """
        synchronizers = self._prepared.synchronizers_of(known, optimizer)
        wanted = [
            synchronizer
            for synchronizer in synchronizers
            if synchronizer.has_local_gradients or (is_repeated and self._was_missed(synchronizer, optimizer))
        ]
        if wanted:
            self.run(wanted)
        for synchronizer in synchronizers:
            self._stepped.setdefault(synchronizer, set()).add(id(optimizer))

    def _was_missed(self, synchronizer: Synchronizer, optimizer: Optimizer) -> bool:
        stepped = self._stepped.get(synchronizer)
        return stepped is None or id(optimizer) in stepped

    def _compare(self) -> None:
        if self._periodic.is_first:
            warn_of_twins(self._strategy, self._batches.first_inputs)
        self._prepared.check_known()
        # Passes within no_sync may be of weights that are each rank's own for as long, as sharpness-aware steps have.
        equal = all(each.weights_are_equal for each in self._prepared.synchronizers) and not self.had_no_sync
        self._periodic.compare(
            self._batches.position,
            {known.number: optimizer for optimizer, known in self._prepared.optimizers.items()},
            self._prepared.numbered_models if equal and not self._strategy.shards else {},
        )

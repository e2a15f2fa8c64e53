"""All-reduce gradients after a backward pass, or before a step if they were not all-reduced yet."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from trainer.config import RunConfig
from trainer.errors import ConfigError, TrainerError
from trainer.loop.consistency import PeriodicCheck
from trainer.loop.grad_scaler import check_step_is_scaled
from trainer.loop.gradients import parameters_of
from trainer.loop.prepared import Prepared, PreparedOptimizer, at_end
from trainer.loop.random_numbers import warn_of_twins
from trainer.loop.weighing import Weighing
from trainer.strategies.base import Strategy
from trainer.strategies.gradients import Synchronizer
from trainer.watch.heartbeat import UpdateCounter
from trainer.watch.spans import EXCHANGE, span


class Exchange:
    """The all-reduces of a `Run`'s gradients, and the optimizers' steps that follow them.

    An optimizer is not wrapped, because its gradients are complete before its step. Hooks on the step serve only
    mechanisms that combine weights, and checks.
    """

    def __init__(self, strategy: Strategy, config: RunConfig, prepared: Prepared, weighing: Weighing) -> None:
        self._strategy, self._config, self._prepared, self._weighing = strategy, config, prepared, weighing
        self._batches = weighing.batches
        self._periodic = PeriodicCheck(strategy)
        self._stepped: weakref.WeakKeyDictionary[Synchronizer, set[int]] = weakref.WeakKeyDictionary()
        """Ids of optimizers that stepped since the last all-reduce, per model."""
        self._running: set[int] = set()
        """Ids of optimizers whose step is running."""
        self.completed = UpdateCounter()
        self.had_no_sync = False
        """Whether a backward pass since the last exchange ran within `no_sync`."""

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Prepare an optimizer, and follow its steps. Collective; see `Prepared.add_optimizer`."""
        known = self._prepared.add_optimizer(optimizer)
        # `known` is handed to each step: a lookup in a weak dictionary takes as long as all the checks of a step.
        at_end(optimizer, optimizer.register_step_pre_hook(partial(self._before_step, known)).remove)
        at_end(optimizer, optimizer.register_step_post_hook(partial(self._after_step, known)).remove)

    def begin_pass(self) -> None:
        """Forget steps that ended in an error. Called when a backward pass begins."""
        self._running.clear()

    def run(self, wanted: Collection[Synchronizer], *, failed: bool = False) -> None:
        """All-reduce the gradients of the models that a pass has reached. Collective.

        Ranks may have reached different models. If there are several, they first agree on those that any rank reached.

        Args:
            wanted: the synchronizers of the models that were reached on this rank.
            failed: whether the pass raised an error on this rank; its gradients are then left out.
        """
        prepared = self._prepared
        # `active` has the same order on every rank; a model that this rank no longer holds is None here.
        reached = synchronizers = [held() for held in prepared.active]
        if len(synchronizers) > 1 and not self._strategy.shards:
            is_wanted = [float(synchronizer in wanted) for synchronizer in synchronizers]
            counts = torch.tensor(is_wanted, device=self._strategy.world.device)
            self._strategy.start_gradients(counts, f"reached.{len(synchronizers)}")()
            reached = [
                synchronizer for synchronizer, count in zip(synchronizers, counts.tolist(), strict=True) if count > 0
            ]
        for synchronizer in filter(None, reached):
            with span(EXCHANGE):
                synchronizer.reduce_after_error() if failed else synchronizer.complete()
            self._stepped[synchronizer] = set()
        if not prepared.has_optimizers:
            self.completed.on_step(self._batches.has_loader)
        if prepared.active and self._periodic.is_due():
            self._compare()
        self.had_no_sync = False

    def _compare(self) -> None:
        prepared = self._prepared
        if self._periodic.is_first:
            warn_of_twins(self._strategy, self._batches.first_inputs)
        prepared.check_known()
        # Within no_sync, each rank's weights may differ for a while, as in sharpness-aware minimization.
        equal = all(each.weights_are_equal for each in prepared.synchronizers) and not self.had_no_sync
        self._periodic.compare(
            self._batches.position,
            {known.number: optimizer for optimizer, known in prepared.optimizers.items()},
            prepared.numbered_models if equal and not self._strategy.shards else {},
        )

    def _before_step(
        self, known: PreparedOptimizer, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if id(optimizer) in self._running:  # this is the parent class's step, called by the subclass's
            return None
        closure, is_fp16 = args[1] if len(args) > 1 else kwargs.get("closure"), self._config.precision == "fp16"
        if is_fp16 and closure is None:
            check_step_is_scaled()
        self._running.add(id(optimizer))
        if closure is None:
            for synchronizer in self._complete(known, optimizer):
                synchronizer.before_step()
            return None
        if is_fp16 or self._config.low_communication_setting:
            raise ConfigError("a closure cannot be combined with fp16, powersgd or sync_every")
        averaging = partial(self._mean_of, closure, known, optimizer)
        if len(args) > 1:
            return (args[0], averaging, *args[2:]), kwargs
        return args, {**kwargs, "closure": averaging}

    def _mean_of(self, closure: Callable[[], Any], known: PreparedOptimizer, optimizer: Optimizer) -> Any:
        """Return the mean over all ranks of a closure's loss, so that they all decide alike by it. Collective."""
        loss = closure()
        self._complete(known, optimizer)
        self._running.add(id(optimizer))  # still within the step: the closure's backward pass has cleared it
        if loss is None:
            return None
        world, weight = self._strategy.world, self._weighing.weight
        mean = torch.as_tensor(loss, device=world.device).detach().double()
        mean = mean * weight if weight else torch.zeros_like(mean)
        return (self._strategy.all_reduce(mean) / world.size).to(getattr(loss, "dtype", torch.float64))

    def _complete(self, known: PreparedOptimizer, optimizer: Optimizer) -> list[Synchronizer]:
        """Check that a step has complete gradients, all-reduce local ones, and return its models' synchronizers."""
        prepared = self._prepared
        prepared.check_groups(known, optimizer)
        is_repeated = prepared.backwards == known.backwards_at_step
        if not self._batches.current.closes_update:
            raise TrainerError(
                f"optimizer.step() came before the update's {self._config.accumulate} batches were complete; step only "
                "where run.sync_gradients is true"
            )
        if is_repeated and any(parameter.grad is not None for parameter in parameters_of(optimizer)):
            raise TrainerError(
                "optimizer.step() found gradients, but run.backward has not run since its last step; call "
                "run.backward(loss) before each step, and zero the gradients after it"
            )
        known.backwards_at_step = prepared.backwards
        synchronizers = prepared.synchronizers_of(known, optimizer)
        # This rank has kept its gradients, or it has skipped a backward pass whose all-reduce the other ranks wait in.
        if wanted := [
            synchronizer
            for synchronizer in synchronizers
            if synchronizer.has_local_gradients or (is_repeated and self._was_missed(synchronizer, optimizer))
        ]:
            if self._config.precision == "fp16":
                raise TrainerError(
                    "scaler.step has unscaled gradients that were not all-reduced yet; under precision 'fp16' call "
                    "run.backward on every rank before each step, and run.synchronize() after run.no_sync, before "
                    "scaler.unscale_ and scaler.step"
                )
            self.run(wanted)
        for synchronizer in synchronizers:
            self._stepped.setdefault(synchronizer, set()).add(id(optimizer))
        return synchronizers

    def _was_missed(self, synchronizer: Synchronizer, optimizer: Optimizer) -> bool:
        """Return whether the model's gradients were not all-reduced since this optimizer's last step."""
        stepped = self._stepped.get(synchronizer)
        return stepped is None or id(optimizer) in stepped

    def _after_step(
        self, known: PreparedOptimizer, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._running.discard(id(optimizer))
        self.completed.on_step(self._batches.has_loader)
        for synchronizer in self._prepared.synchronizers_of(known, optimizer):
            synchronizer.after_step()

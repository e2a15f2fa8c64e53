"""Steps: what the handle does around an optimizer's step, in hooks: checks, and what combines steps over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from trainer.config import RunConfig
from trainer.errors import ConfigError, TrainerError
from trainer.loop.exchange import Exchange
from trainer.loop.loss_scaler import LossScaler, gradients_of
from trainer.loop.prepared import Prepared, PreparedOptimizer, hook_steps
from trainer.loop.weighing import Weighing
from trainer.strategies.base import Strategy


class Steps:
    """The steps of one `Run`'s prepared optimizers.

    An optimizer is not wrapped: its gradients are complete before its step. Its hooks are left for what combines steps,
    for the loss scale, and for checks.
    """

    def __init__(
        self,
        strategy: Strategy,
        config: RunConfig,
        prepared: Prepared,
        exchange: Exchange,
        weighing: Weighing,
        scaler: LossScaler | None,
    ) -> None:
        self._strategy, self._config, self._prepared = strategy, config, prepared
        self._exchange, self._weighing, self._scaler = exchange, weighing, scaler
        self._running: set[int] = set()
        """The ids of optimizers within a step."""

    def add(self, optimizer: Optimizer) -> None:
        """Prepare an optimizer. Collective; see `Prepared.add_optimizer`."""
        known = self._prepared.add_optimizer(optimizer)
        # Handed to each step: a lookup in a weak dictionary takes as long as all the checks of a step.
        hook_steps(optimizer, partial(self._before_step, known), partial(self._after_step, known))

    def begin_pass(self) -> None:
        """Forget steps that an error has ended: a backward pass begins."""
        self._running.clear()

    def _before_step(
        self, known: PreparedOptimizer, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if id(optimizer) in self._running:  # the step of a class that calls its parent's
            return None
        self._running.add(id(optimizer))
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._complete(known, optimizer)
            for synchronizer in self._prepared.synchronizers_of(known, optimizer):
                synchronizer.before_step()
            if self._scaler is not None:
                self._scaler.before_step(optimizer)
            return None
        if self._scaler is not None or self._config.reduction == "adasum" or self._config.shared_mechanism:
            raise ConfigError("a closure goes with neither fp16, adasum, powersgd, sync_every nor outer_lr")
        averaging = self._averaging(known, optimizer, closure)
        if len(args) > 1:
            return (args[0], averaging, *args[2:]), kwargs
        return args, {**kwargs, "closure": averaging}

    def _averaging(
        self, known: PreparedOptimizer, optimizer: Optimizer, closure: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Return a closure that returns the mean loss over all ranks, on which the optimizer's decisions depend."""

        def average() -> Any:
            loss = closure()
            self._complete(known, optimizer)
            self._running.add(id(optimizer))  # still within the step
            if loss is None:
                return None
            world, weight = self._strategy.world, self._weighing.weight
            mean = torch.as_tensor(loss, device=world.device).detach().double()
            mean = mean * weight if weight else torch.zeros_like(mean)
            return (self._strategy.all_reduce(mean) / world.size).to(getattr(loss, "dtype", torch.float64))

        return average

    def _complete(self, known: PreparedOptimizer, optimizer: Optimizer) -> None:
        """Check that a step has complete gradients, and all-reduce what was left on this rank."""
        self._prepared.check_groups(known, optimizer)
        backwards = self._prepared.backwards
        is_repeated = backwards == known.backwards_at_step
        if not self._weighing.batches.closes_update:
            raise TrainerError(
                f"optimizer.step() came before the update's {self._config.accumulate} batches were complete; step only "
                "where run.sync_gradients is true"
            )
        if is_repeated and gradients_of(optimizer):
            raise TrainerError(
                "optimizer.step() found gradients, but run.backward has not run since its last step; call "
                "run.backward(loss) before each step, and zero the gradients after it"
            )
        known.backwards_at_step = backwards
        self._exchange.run_before_step(known, optimizer, is_repeated=is_repeated)

    def _after_step(
        self, known: PreparedOptimizer, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._running.discard(id(optimizer))
        self._exchange.completed.on_step(self._weighing.batches.has_loader)
        for synchronizer in self._prepared.synchronizers_of(known, optimizer):
            synchronizer.after_step()
        if self._scaler is not None:
            self._scaler.after_step(optimizer)

"""Updates: from a batch to the gradients of the step that it ends in, the mean over all ranks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.cluster.output import print_line
from trainer.config import RunConfig
from trainer.data.base import Step
from trainer.errors import ConfigError, TrainerError
from trainer.loop.batches import Batches
from trainer.loop.exchange import Exchange
from trainer.loop.prepared import Prepared
from trainer.loop.weighing import Weighing
from trainer.models.sync_batch_norm import leave_out
from trainer.strategies.base import Strategy
from trainer.strategies.gradients import GradientSynchronizer, Synchronizer


class Updates:
    """The backward passes of one `Run`. One that closes an update returns when the gradients are the mean of all ranks.

    `prepared` knows the models and optimizers, `batches` which batch a pass is of, and `Weighing` what that counts for;
    `exchange` makes the gradients the mean, and follows the optimizers' steps. Any other code may read and change the
    gradients in between, as in one process.
    """

    def __init__(self, strategy: Strategy, config: RunConfig) -> None:
        self._strategy, self._config = strategy, config
        self.prepared = Prepared(strategy, config)
        is_watching = strategy.world.size > 1 or config.accumulate > 1
        self.batches = Batches(strategy.world.size, is_watching=is_watching, on_step=self._on_step)
        self._weighing = Weighing(strategy, config.accumulate, self.prepared, self.batches)
        self.exchange = Exchange(strategy, config, self.prepared, self._weighing)
        self._is_local = self._is_padding = self._is_in_pass = self._has_warned = False
        self._in_no_sync = 0
        self._kept: weakref.ref[nn.Parameter] | None = None
        """A parameter that has a gradient since the update's first batch, unless zero_grad came."""

    def add_model(self, model: nn.Module) -> nn.Module:
        """Prepare a model, and return the module to call for it. Collective; see `Prepared.add_model`."""
        synchronizer = self.prepared.add_model(model)
        synchronizer.keep_local(self._is_local)
        forward = self._strategy.wrap(model)
        self.batches.watch(forward)
        return forward

    def on_batch(self, loader: int, step: Step) -> None:
        """Note what the loader of this number knows of the batch that it is about to yield."""
        if self.batches.current.closes_update or step.batch is None:  # another update begins, or the loop was left
            self._kept = None
        self.exchange.completed.on_batch()
        self.batches.on_batch(loader, step)

    def _on_step(self, step: Step) -> None:
        """Prepare for a step's forward and backward pass."""
        self._keep_local()
        if self._is_padding is not (step.count == 0):
            self._is_padding = step.count == 0
            leave_out(self.prepared.norms, self._is_padding)

    def _keep_local(self) -> None:
        local = self._in_no_sync > 0 or not self.batches.current.closes_update
        if local is not self._is_local:
            self._is_local = local
            for synchronizer in self.prepared.synchronizers:
                synchronizer.keep_local(local)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Run.no_sync`."""
        self._in_no_sync += 1
        self._keep_local()
        try:
            yield
        finally:
            self._in_no_sync -= 1
            self._keep_local()

    def backward(self, loss: Tensor, samples: float | None, **options: Any) -> None:
        """See `Run.backward`, whose options are those of `torch.Tensor.backward`."""
        prepared, scaler = self.prepared, self.prepared.scaler
        self._check_backward()
        if self._is_in_pass:
            self._finish_failed_pass()
        self._weighing.before_pass()
        weight = self._weighing.begin_pass(samples, self._is_local)
        for synchronizer in prepared.synchronizers:
            synchronizer.is_weightless = weight == 0.0
            synchronizer.before_backward()
        if scaler is not None:
            scaler.before_backward(prepared.optimizers)
        self._run_pass(loss, weight, options)
        if scaler is not None:
            scaler.after_backward()
        prepared.backwards += 1
        self.exchange.had_no_sync |= self._in_no_sync > 0
        if not self._is_local:
            self.exchange.run(self._reached())
        elif not self.batches.current.closes_update:
            kept = next((parameter for parameter in prepared.trained() if parameter.grad is not None), None)
            self._kept = weakref.ref(kept) if kept is not None else None

    def _run_pass(self, loss: Tensor, weight: float, options: dict[str, Any]) -> None:
        # A weight of exactly 1 is left out: the step is then that of a hand-written loop, to the last bit.
        weighted = loss if weight == 1.0 else loss * weight
        # 0 × NaN is NaN: a mean over nothing may be one, and has no gradient here.
        hooks = (
            [parameter.register_hook(torch.zeros_like) for parameter in self.prepared.trained()] if not weight else []
        )
        scaler = self.prepared.scaler
        self._is_in_pass = self.batches.is_in_pass = True
        try:
            (scaler.scale(weighted) if scaler else weighted).backward(**options)
        finally:
            self.batches.end_pass()
            for hook in hooks:
                hook.remove()
        self._end_pass()
        if weight:
            self._warn_of_others()

    def _end_pass(self) -> None:
        self._is_in_pass = False
        for synchronizer in self.prepared.synchronizers:
            synchronizer.after_backward()

    def _reached(self) -> list[Synchronizer]:
        return [synchronizer for synchronizer in self.prepared.synchronizers if synchronizer.is_reached]

    def _finish_failed_pass(self) -> None:
        """Send what the other ranks wait for, in place of a pass that has ended in an error here."""
        self._end_pass()
        if self.prepared.active and not self._is_local:
            self.exchange.run(self._reached(), failed=True)

    def _warn_of_others(self) -> None:
        """Warn once of a pass that has trained something else than the models that were prepared."""
        if self._has_warned or not self.prepared.active or not self._strategy.world.is_root:
            return
        # Others cannot tell.
        followed = [each for each in self.prepared.synchronizers if isinstance(each, GradientSynchronizer)]
        if followed and not any(synchronizer.is_reached for synchronizer in followed):
            self._has_warned = True
            print_line(
                "trainer: WARNING: run.backward has reached no parameter of a model that was prepared. What it trains "
                "instead, a copy of such a model for example, each rank trains on its own batches: prepare that one",
                sys.stderr,
            )

    def _check_backward(self) -> None:
        self.exchange.begin_pass()
        if not self.prepared.has_models:
            raise TrainerError(
                "run.backward came before run.prepare: the ranks would train models of their own; call "
                "model, optimizer = run.prepare(model, optimizer) first"
            )
        if self.prepared.scaler is not None and not self.prepared.optimizers:
            raise TrainerError(
                "precision is 'fp16', whose loss scale leaves out steps with gradients that overflow, and no optimizer "
                "was prepared: call run.prepare(model, optimizer), or keep torch.amp.GradScaler under precision 'fp32'"
            )
        kept, self._kept = self._kept() if self._kept is not None else None, None
        if kept is not None and kept.grad is None:
            raise TrainerError(
                "the gradients of this update's earlier batches are gone, and accumulate is "
                f"{self._config.accumulate}; call zero_grad only after a step, where run.sync_gradients is true"
            )
        self.prepared.check_frozen()

    def synchronize(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """See `Run.synchronize`."""
        if self._config.reduction == "adasum":
            raise ConfigError(
                "reduction is 'adasum', which combines finished steps: there are no mean gradients to read"
            )
        for optimizer in optimizers:
            if optimizer not in self.prepared.optimizers:
                raise ConfigError(f"this {type(optimizer).__name__} was not prepared; call run.prepare with it first")
        if kept := [each for each in self.prepared.synchronizers if each.has_local_gradients]:
            self.exchange.run(kept)

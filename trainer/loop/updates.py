"""Backward passes, each weighted by its batch, and the mean gradients that end an update."""

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

_PADDING = (
    "trainer: rank {} computes on a padding batch, because fewer than two samples a rank are left in this step: it "
    "counts in no gradient and no BatchNorm. What the script itself keeps of each batch (a queue, an average) should "
    "leave it out: run.batch_samples is 0"
)


class Updates:
    """The backward passes of a `Run`. A pass that closes an update leaves the mean gradients over all ranks.

    `prepared` has the models and optimizers, `batches` says which batch a pass belongs to, `Weighing` gives the pass
    its weight, and `exchange` all-reduces the gradients and follows the optimizers' steps.

    Once `backward` has returned, no gradient is being all-reduced: until the step, any code may read and change the
    gradients, as in a single process.
    """

    def __init__(self, strategy: Strategy, config: RunConfig) -> None:
        self._strategy, self._config = strategy, config
        self.prepared = Prepared(strategy, config)
        is_watching = strategy.world.size > 1 or config.accumulate > 1
        self.batches = Batches(strategy.world.size, is_watching=is_watching, on_step=self._on_step)
        self._weighing = Weighing(strategy, config.accumulate, self.prepared, self.batches)
        self.exchange = Exchange(strategy, config, self.prepared, self._weighing)
        self._is_padding = self._is_in_pass = self._has_warned = self._has_told_of_padding = False
        self._in_no_sync = 0
        self._kept: weakref.ref[nn.Parameter] | None = None
        """A parameter with a gradient from this update's earlier batches. If it is gone, zero_grad came too early."""

    def add_model(self, model: nn.Module) -> nn.Module:
        """Prepare a model, and return the module to call for it. Collective; see `Prepared.add_model`."""
        self.prepared.add_model(model)
        forward = self._strategy.wrap(model)
        self.batches.watch(forward)
        return forward

    def on_batch(self, loader: int, step: Step) -> None:
        """Note the batch that the loader with this number is about to yield."""
        if self.batches.current.closes_update or step.batch is None:  # another update begins, or the loop was left
            self._kept = None
        self.exchange.completed.on_batch()
        self.batches.on_batch(loader, step)

    def _on_step(self, step: Step) -> None:
        """Prepare for a step's forward and backward pass."""
        if self._is_padding is not (step.count == 0):
            self._is_padding = step.count == 0
            leave_out(self.prepared.norms, self._is_padding)
            self.prepared.batch.counts = not self._is_padding
            self._tell_of_padding()

    def _tell_of_padding(self) -> None:
        if self._is_padding and not self._has_told_of_padding:
            self._has_told_of_padding = True
            world = self._strategy.world
            if world.rank == world.size - 1:  # the first that runs out of samples
                print_line(_PADDING.format(world.rank), sys.stderr)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Run.no_sync`."""
        self._in_no_sync += 1
        try:
            yield
        finally:
            self._in_no_sync -= 1

    def backward(self, loss: Tensor, samples: float | None, *, is_sum: bool = False, **options: Any) -> None:
        """See `Run.backward`, whose options are those of `torch.Tensor.backward`."""
        self._check_backward()
        if self._is_in_pass:
            self._finish_failed_pass()
        self._weighing.begin_pass(samples, is_sum=is_sum, is_in_no_sync=self._in_no_sync > 0)
        weight, is_local = self._weighing.weight, self._weighing.is_local
        for synchronizer in self.prepared.synchronizers:
            synchronizer.before_backward(is_local=is_local, is_weightless=weight == 0.0)
        self._run_pass(loss, weight, options)
        self.prepared.backwards += 1
        self.exchange.had_no_sync |= self._in_no_sync > 0
        if not is_local:
            self.exchange.run(self._reached())
        elif not self.batches.current.closes_update:
            kept = next((parameter for parameter in self.prepared.trained() if parameter.grad is not None), None)
            self._kept = weakref.ref(kept) if kept is not None else None

    def _run_pass(self, loss: Tensor, weight: float, options: dict[str, Any]) -> None:
        # A weight of exactly 1 is left out: the step is then that of a hand-written loop, to the last bit.
        weighted = loss if weight == 1.0 else loss * weight
        # The mean over an empty batch may be NaN, and 0 × NaN is NaN. These hooks make its gradients zeros, and so do
        # those of statistics that all ranks sum up.
        hooks = (
            [parameter.register_hook(torch.zeros_like) for parameter in self.prepared.trained()] if not weight else []
        )
        self._is_in_pass = self.batches.is_in_pass = True
        self.prepared.batch.is_weighed = bool(weight)
        try:
            weighted.backward(**options)
        finally:
            self.batches.end_pass()
            self.prepared.batch.is_weighed = True
            for hook in hooks:
                hook.remove()
        self._end_pass()
        if weight:
            self._warn_if_unreached()

    def _end_pass(self) -> None:
        self._is_in_pass = False
        for synchronizer in self.prepared.synchronizers:
            synchronizer.after_backward()

    def _reached(self) -> list[Synchronizer]:
        """Return the synchronizers of the models that the last backward pass reached on this rank."""
        return [synchronizer for synchronizer in self.prepared.synchronizers if synchronizer.is_reached]

    def _finish_failed_pass(self) -> None:
        """Take part in the all-reduces of a pass that failed on this rank, so that the other ranks do not hang."""
        self._end_pass()
        if self.prepared.active and not self._weighing.is_local:
            self.exchange.run(self._reached(), failed=True)

    def _warn_if_unreached(self) -> None:
        """Warn once if a pass reached no prepared model."""
        if self._has_warned or not self.prepared.active or not self._strategy.world.is_root:
            return
        # Other synchronizers do not note which parameters a pass reaches.
        followed = [each for each in self.prepared.synchronizers if isinstance(each, GradientSynchronizer)]
        if followed and not any(synchronizer.is_reached for synchronizer in followed):
            self._has_warned = True
            print_line(
                "trainer: WARNING: run.backward has reached no parameter of a model that was prepared. Each rank "
                "trains what it reaches instead, a copy of such a model say, on its own batches alone: prepare that",
                sys.stderr,
            )

    def _check_backward(self) -> None:
        self.exchange.begin_pass()
        if not self.prepared.has_models:
            raise TrainerError(
                "run.backward came before run.prepare: each rank would train a model of its own; call "
                "model, optimizer = run.prepare(model, optimizer) first"
            )
        if self._config.precision == "fp16" and not self.prepared.optimizers:
            raise TrainerError(
                "precision is 'fp16', and no optimizer was prepared, so nothing tells whether a GradScaler takes its "
                "steps; call run.prepare(model, optimizer), or write torch.autocast yourself under precision 'fp32'"
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
        for optimizer in optimizers:
            if optimizer not in self.prepared.optimizers:
                raise ConfigError(f"this {type(optimizer).__name__} was not prepared; call run.prepare with it first")
        if kept := [each for each in self.prepared.synchronizers if each.has_local_gradients]:
            self.exchange.run(kept)

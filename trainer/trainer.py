"""Trainer: the training loop and the evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from trainer.callbacks.base import Callback, EpochRecord, Evaluation, FitContext, ProgressEvent
from trainer.callbacks.progress import Progress
from trainer.callbacks.run_record import RunRecord
from trainer.config import TrainerConfig
from trainer.consistency import check_consistency
from trainer.data.loader import ShardedLoader, Step
from trainer.data.shard_plan import mix_seeds
from trainer.errors import ConfigError, TrainerError
from trainer.lr_schedule import LearningRate, make_schedule
from trainer.metrics import Metric, Sums
from trainer.preparation import join, wrap
from trainer.profiling.step_timer import step_timer
from trainer.strategies.base import Strategy, SupportsNoSync
from trainer.sync_batch_norm import exclude_padding

# Often enough for a bar and for a loss that turns NaN; seldom enough to cost nothing on a GPU.
_PROGRESS_INTERVAL_S = 0.5
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """Trains a model across all ranks of the job that the script was launched into.

    Args:
        model: any module; it is moved to this rank's device and gets rank 0's weights.
        optimizer: over the model's parameters, with the learning rate for one rank.
        loss: takes the model's outputs and the targets, returns the mean over the batch.
        strategy: a name out of `trainer.strategies.NAMES`, or a strategy.
        config: see `TrainerConfig`.
        metrics: further values for the evaluation, by name; each returns a sum over the batch.
        callbacks: see `Callback`.
        output: the folder of this run's record, which must not hold one yet; "auto" makes a new one under runs/,
            None leaves no record.
        tensorboard: also write TensorBoard events into that folder.
        progress: show a bar on a terminal, lines elsewhere.

    Raises:
        ConfigError: a setting is not valid, the strategy is not available here, or the ranks' settings differ.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[Any, Any], Tensor],
        *,
        strategy: str | Strategy = "auto",
        config: TrainerConfig | None = None,
        metrics: Mapping[str, Metric] | None = None,
        callbacks: Sequence[Callback] = (),
        output: str | Path | None = "auto",
        tensorboard: bool = False,
        progress: bool = True,
    ) -> None:
        self.config = config or TrainerConfig()
        self.loss = loss
        self.metrics = dict(metrics or {})
        self.strategy = join(strategy, self.config)
        self.world = self.strategy.world
        self.model = model
        """The model itself, never a wrapper; its `state_dict` is what a checkpoint saves."""
        self.callbacks: list[Callback] = [*callbacks]
        if output is not None:
            self.callbacks.insert(0, RunRecord(output, tensorboard=tensorboard))
        if progress:
            self.callbacks.append(Progress(self.config.log_every_s))
        if isinstance(loss, nn.Module):
            loss.to(self.world.device)  # its class weights, say
        self._forward, self.optimizer = wrap(self.strategy, model, optimizer, self.config)
        fp16 = self.config.precision == "fp16"
        self._scaler = torch.amp.GradScaler(self.world.device.type) if fp16 else None
        self._updates = 0

    def fit(self, train: Dataset[Any], validation: Dataset[Any] | None = None, *, epochs: int) -> list[EpochRecord]:
        """Train for `epochs` epochs, evaluating on `validation` after each. Collective.

        Args:
            train: `InMemory`, or any map-style dataset of (input, target) pairs.
            validation: evaluated after each epoch; the same kinds of dataset.

        Returns:
            One record per epoch, the same on every rank.

        Raises:
            ConfigError: `epochs` is not positive, a dataset is empty, or they differ between ranks.
            TrainerError: the loss is no longer a finite number.
        """
        if epochs < 1:
            raise ConfigError(f"epochs is {epochs}; it must be at least 1")
        config = self.config
        loader = self._loader(train, shuffle=True)
        validator = self._loader(validation, shuffle=False) if validation is not None else None
        lengths = [one.plan.samples for one in (loader, validator) if one is not None]
        check_consistency(self.strategy, {"epochs": epochs, "samples to train and validate on": lengths})
        torch.manual_seed(mix_seeds(config.seed, self.world.rank))
        schedule = make_schedule(
            config, world_size=self.world.size, updates_per_epoch=loader.plan.updates, epochs=epochs
        )
        learning_rate = LearningRate(self.optimizer, schedule)
        self._updates = 0
        context = self._context(epochs)
        self._notify("on_fit_start", context)
        records = []
        try:
            for epoch in range(1, epochs + 1):
                record = self._train_epoch(loader, learning_rate, epoch, context, validator)
                self._notify("on_epoch_end", context, record)
                records.append(record)
        finally:
            learning_rate.restore()
        self._notify("on_fit_end", context, records)
        return records

    def evaluate(self, data: Dataset[Any]) -> Evaluation:
        """Return the means of the loss and of every metric over `data`, each sample counted once. Collective."""
        return self._evaluate(self._loader(data, shuffle=False))

    def _evaluate(self, loader: ShardedLoader) -> Evaluation:
        self.strategy.broadcast_buffers(self.model)
        sums = Sums(("loss", *self.metrics), self.world.device)
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        with torch.no_grad(), self._autocast():
            for step in loader.own_samples():
                outputs = self.model(self._layout(step.inputs))
                values = [self.loss(outputs, step.targets).double() * step.count]
                values += [metric(outputs, step.targets) for metric in self.metrics.values()]
                sums.add(tuple(values), step.count)
        for module, training in modes:  # as before: the user may have set some to eval
            module.training = training
        means, counted = sums.mean(self.strategy.all_reduce)
        return Evaluation(metrics=means, evaluated=counted, samples=loader.plan.samples)

    def _loader(self, data: Dataset[Any], *, shuffle: bool) -> ShardedLoader:
        config = self.config
        return ShardedLoader(
            data,
            config.batch_size if shuffle else config.eval_batch_size or config.batch_size,
            shuffle=shuffle,
            seed=config.seed,
            accumulate=config.accumulate,
            world=self.world,
            workers=config.workers,
        )

    def _train_epoch(
        self,
        loader: ShardedLoader,
        learning_rate: LearningRate,
        epoch: int,
        context: FitContext,
        validator: ShardedLoader | None,
    ) -> EpochRecord:
        self.model.train()
        self.optimizer.zero_grad()
        sums = Sums(("loss",), self.world.device)
        started = time.perf_counter()
        next_event = started + _PROGRESS_INTERVAL_S
        opens_update = True
        for number, step in enumerate(loader.steps()):
            if opens_update:
                learning_rate.set_for(self._updates)
            loss = self._step(step)
            opens_update = step.closes_update
            if opens_update:
                self._update()
            if step.count:
                sums.add_mean(loss, step.count)
            if time.perf_counter() >= next_event:
                self._report_progress(context, sums, loader, number, epoch, time.perf_counter() - started)
                next_event = time.perf_counter() + _PROGRESS_INTERVAL_S
        self._finite(sums, epoch, len(loader))
        means, samples = sums.mean(self.strategy.all_reduce)
        seconds = time.perf_counter() - started
        return EpochRecord(
            epoch=epoch,
            epochs=context.epochs,
            train_loss=means["loss"],
            samples=samples,
            seconds=seconds,
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
            world_size=self.world.size,
            validation=self._evaluate(validator) if validator is not None else None,
        )

    def _step(self, step: Step) -> Tensor:
        """Run the forward and the backward pass; return the local mean loss."""
        if step.closes_update and step.count:
            return self._forward_and_backward(step)
        with self._no_sync_unless(step.closes_update), nullcontext() if step.count else exclude_padding(self.model):
            return self._forward_and_backward(step)

    def _forward_and_backward(self, step: Step) -> Tensor:
        with self._autocast():
            loss = self.loss(self._forward(self._layout(step.inputs)), step.targets)
        # A weight of exactly 1 is left out: the step is then that of a hand-written loop, to the last bit.
        weighted = loss if step.weight == 1.0 else loss * step.weight
        (self._scaler.scale(weighted) if self._scaler else weighted).backward()
        return loss

    def _update(self) -> None:
        """Apply the all-reduced gradients and reset them."""
        clip = self.config.clip_norm
        if self._scaler is None and clip is None:
            self.optimizer.step()
        else:
            self.strategy.synchronize(self.optimizer)
            if timer := step_timer():
                timer.mark_synchronized()
            if self._scaler:
                self._scaler.unscale_(self.optimizer)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(
                    [p for group in self.optimizer.param_groups for p in group["params"]], clip
                )
            self.strategy.step(self.optimizer, self._scaler)
            if self._scaler:
                self._scaler.update()
        self.optimizer.zero_grad()
        self._updates += 1

    def _no_sync_unless(self, last: bool) -> AbstractContextManager[None]:
        """Keep gradients on this rank until the last micro-batch of an update."""
        if last or not isinstance(self.strategy, SupportsNoSync):
            return nullcontext()
        return self.strategy.no_sync(self._forward, self.optimizer)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = _AUTOCAST.get(self.config.precision)
        return torch.autocast(self.world.device.type, dtype=dtype) if dtype else nullcontext()

    def _layout(self, inputs: Any) -> Any:
        if self.config.channels_last and isinstance(inputs, Tensor) and inputs.dim() == 4:
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    def _report_progress(
        self, context: FitContext, sums: Sums, loader: ShardedLoader, step: int, epoch: int, seconds: float
    ) -> None:
        loss = self._finite(sums, epoch, step + 1)
        samples = loader.plan.samples
        done = min(samples, (step + 1) * loader.plan.step_size)
        event = ProgressEvent(
            epoch=epoch, epochs=context.epochs, done=done, samples=samples, loss=loss, seconds=seconds
        )
        self._notify("on_progress", context, event)

    def _finite(self, sums: Sums, epoch: int, step: int) -> float:
        """Return this rank's mean loss so far; raise `TrainerError` where it is not a finite number."""
        loss = sums.local_mean("loss")
        if not math.isfinite(loss):
            rate = self.optimizer.param_groups[0]["lr"]
            raise TrainerError(
                f"the loss turned {loss} in epoch {epoch}, by step {step}, at learning rate {rate:g}; "
                "lower the learning rate or set clip_norm"
            )
        return loss

    def _context(self, epochs: int) -> FitContext:
        return FitContext(
            world=self.world,
            model=self.model,
            optimizer=self.optimizer,
            epochs=epochs,
            config=self.config,
            strategy_name=type(self.strategy).__name__,
            description=self.strategy.description,
            tuning=self.strategy.tuning,
            broadcast_object=self.strategy.broadcast_object,
        )

    def _notify(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(*arguments)

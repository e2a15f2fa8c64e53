"""Trainer: fit and evaluate, the one loop."""

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

from trainer.agreement import check_agreement
from trainer.batch_norm import stand_in
from trainer.callbacks import Callback, EpochRecord, Evaluation, Pulse
from trainer.config import TrainerConfig
from trainer.data.loader import ShardedLoader, Step
from trainer.data.sharding import mix_seeds
from trainer.errors import ConfigError, TrainerError
from trainer.metrics import Metric, Sums
from trainer.preparation import join, wrap
from trainer.progress import Progress
from trainer.record import RunRecord
from trainer.schedule import LearningRate, make_schedule
from trainer.strategies.base import SkipsExchange, Strategy
from trainer.timing import step_timer

# Often enough for a bar and for a loss that turns NaN; seldom enough to cost nothing on a GPU.
_PULSE_S = 0.5
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """Trains a model on however many processes the script was launched with.

    Args:
        model: any module; it is moved to this rank's device and given rank 0's weights.
        optimizer: over the model's parameters, with the learning rate for one rank.
        loss: takes the model's outputs and the targets, returns the mean over the batch.
        strategy: a name out of `trainer.strategies.NAMES`, or a strategy.
        config: everything else; see `TrainerConfig`.
        metrics: further values for the evaluation, by name; each returns a sum over the batch.
        callbacks: see `Callback`.
        output: the folder of this run's record, which must not hold one yet; "auto" makes a new one under runs/,
            None leaves no record.
        tensorboard: also write TensorBoard events into that folder.
        progress: show a bar on a terminal, lines elsewhere.

    Raises:
        ConfigError: a setting is not valid, the strategy cannot be had, or the ranks disagree.
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
        """The model itself, never a wrapper: what a checkpoint keeps."""
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
        """Trains for `epochs` epochs, evaluating on `validation` after each. Collective.

        Args:
            train: `InMemory`, or any map-style dataset of (input, target) pairs.
            validation: likewise.

        Returns:
            One record per epoch, the same on every rank.

        Raises:
            ConfigError: `epochs` is not positive, a dataset is empty, or the ranks disagree about them.
            TrainerError: the loss is no longer a finite number.
        """
        if epochs < 1:
            raise ConfigError(f"epochs is {epochs}; it must be at least 1")
        config = self.config
        loader = self._loader(train, shuffle=True)
        validator = self._loader(validation, shuffle=False) if validation is not None else None
        lengths = [one.plan.samples for one in (loader, validator) if one is not None]
        check_agreement(self.strategy, {"epochs": epochs, "samples to train and validate on": lengths})
        torch.manual_seed(mix_seeds(config.seed, self.world.rank))
        schedule = make_schedule(
            config, world_size=self.world.size, updates_per_epoch=loader.plan.updates, epochs=epochs
        )
        learning_rate = LearningRate(self.optimizer, schedule)
        self._updates = 0
        self._tell("on_fit_start", epochs)
        records = []
        try:
            for epoch in range(1, epochs + 1):
                record = self._train_epoch(loader, learning_rate, epoch, epochs, validator)
                self._tell("on_epoch_end", record)
                records.append(record)
        finally:
            learning_rate.restore()
        self._tell("on_fit_end", records)
        return records

    def evaluate(self, data: Dataset[Any]) -> Evaluation:
        """Means of the loss and of every metric over `data`, each sample counted once. Collective."""
        return self._evaluate(self._loader(data, shuffle=False))

    def _evaluate(self, loader: ShardedLoader) -> Evaluation:
        self.strategy.share_buffers(self.model)
        sums = Sums(("loss", *self.metrics), self.world.device)
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        with torch.no_grad(), self._autocast():
            for step in loader.own_samples():
                outputs = self.model(self._layout(step.inputs))
                values = [self.loss(outputs, step.targets).double() * step.count]
                values += [metric(outputs, step.targets) for metric in self.metrics.values()]
                sums.add(tuple(values), step.count)
        for module, training in modes:  # each as it was: parts of it may be frozen
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
        epochs: int,
        validator: ShardedLoader | None,
    ) -> EpochRecord:
        self.model.train()
        self.optimizer.zero_grad()
        sums = Sums(("loss",), self.world.device)
        started = time.perf_counter()
        next_pulse = started + _PULSE_S
        opens_update = True
        for number, step in enumerate(loader.steps()):
            if opens_update:
                learning_rate.set_for(self._updates)
            loss = self._step(step)
            opens_update = step.closes_update
            if opens_update:
                self._update()
            if step.count:
                sums.add((loss.detach().double() * step.count,), step.count)
            if time.perf_counter() >= next_pulse:
                self._pulse(sums, loader, number, epoch, epochs, time.perf_counter() - started)
                next_pulse = time.perf_counter() + _PULSE_S
        self._finite(sums, epoch, len(loader))
        means, samples = sums.mean(self.strategy.all_reduce)
        seconds = time.perf_counter() - started
        return EpochRecord(
            epoch=epoch,
            epochs=epochs,
            train_loss=means["loss"],
            samples=samples,
            seconds=seconds,
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
            world_size=self.world.size,
            validation=self._evaluate(validator) if validator is not None else None,
        )

    def _step(self, step: Step) -> Tensor:
        """Forward and backward; returns the local mean loss."""
        with self._exchange_only(step.closes_update), nullcontext() if step.count else stand_in(self.model):
            with self._autocast():
                loss = self.loss(self._forward(self._layout(step.inputs)), step.targets)
            # A weight of exactly 1 is left out: the step is then the very one of a loop written by hand.
            weighted = loss if step.weight == 1.0 else loss * step.weight
            (self._scaler.scale(weighted) if self._scaler else weighted).backward()
        return loss

    def _update(self) -> None:
        """Applies the exchanged gradients and forgets them."""
        clip = self.config.clip_norm
        if self._scaler is None and clip is None:
            self.optimizer.step()
        else:
            self.strategy.synchronize(self.optimizer)
            if timer := step_timer():
                timer.gradients_are_there()
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

    def _exchange_only(self, last: bool) -> AbstractContextManager[None]:
        """Keeps gradients on this rank until the last micro-batch of an update."""
        if last or not isinstance(self.strategy, SkipsExchange):
            return nullcontext()
        return self.strategy.no_exchange(self._forward, self.optimizer)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = _AUTOCAST.get(self.config.precision)
        return torch.autocast(self.world.device.type, dtype=dtype) if dtype else nullcontext()

    def _layout(self, inputs: Any) -> Any:
        if self.config.channels_last and isinstance(inputs, Tensor) and inputs.dim() == 4:
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    def _pulse(self, sums: Sums, loader: ShardedLoader, step: int, epoch: int, epochs: int, seconds: float) -> None:
        loss = self._finite(sums, epoch, step + 1)
        samples = loader.plan.samples
        done = min(samples, (step + 1) * loader.plan.step_size)
        self._tell(
            "on_pulse", Pulse(epoch=epoch, epochs=epochs, done=done, samples=samples, loss=loss, seconds=seconds)
        )

    def _finite(self, sums: Sums, epoch: int, step: int) -> float:
        """This rank's mean loss so far, if it is one."""
        loss = sums.local_mean("loss")
        if not math.isfinite(loss):
            rate = self.optimizer.param_groups[0]["lr"]
            raise TrainerError(
                f"the loss turned {loss} in epoch {epoch}, by step {step}, at learning rate {rate:g}; "
                "lower the learning rate or set clip_norm"
            )
        return loss

    def _tell(self, event: str, *facts: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *facts)

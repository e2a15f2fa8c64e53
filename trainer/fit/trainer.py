"""Trainer: the training loop and the evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from trainer.checkpoint.run.checkpoints import Checkpoints
from trainer.config import CheckpointConfig, RunConfig, TrainerConfig
from trainer.data.base import is_stream
from trainer.data.batches import Step
from trainer.data.loader import ShardedLoader
from trainer.data.shard_plan import mix_seeds
from trainer.errors import ConfigError, TrainerError
from trainer.fit.fit_state import FitState
from trainer.loop.consistency import check_consistency, describe_settings
from trainer.loop.gradients import parameters_of
from trainer.loop.lr_schedule import LearningRate, UsersSchedule, make_schedule
from trainer.loop.metrics import Metric
from trainer.models.memory_format import to_channels_last
from trainer.report.callback import Callback, EpochRecord, Evaluation, FitContext, ProgressEvent, UpdateRecord
from trainer.report.progress import Progress
from trainer.report.run_record import RunRecord
from trainer.run import Run
from trainer.strategies.base import Strategy

# Often enough for a bar and for a loss that turns NaN; seldom enough to cost nothing on a GPU.
_PROGRESS_INTERVAL_S = 0.5


class Trainer:
    """Trains a model across all ranks of the job that the script was launched into.

    Args:
        model: any module; it is moved to this rank's device and gets rank 0's weights.
        optimizer: over the model's parameters, with the learning rate for one rank.
        loss: takes the model's outputs and the targets, returns the mean over the batch.
        run: the handle to train with, for a script that has called `trainer.init`; None calls it.
        strategy: a name out of `trainer.strategies.NAMES`, or a strategy; not given together with `run`.
        config: see `TrainerConfig`; not given together with `run`.
        metrics: further values for the evaluation, by name; each returns a sum over the batch.
        lr_scheduler: a scheduler of torch.optim.lr_scheduler for this optimizer, which then alone sets the learning
            rate; without it, `scale_lr`, `warmup_epochs` and `decay` do.
        lr_scheduler_per: "update" or "epoch", after which the scheduler takes a step.
        callbacks: see `Callback`.
        output: the folder of this run's record, which must not hold a record yet; "auto" makes a new folder under
            runs/, None leaves no record.
        progress: show a bar on a terminal, lines elsewhere.
        checkpoint: where and when `fit` saves the training, and whether it goes on with an earlier training.

    Raises:
        ConfigError: a setting is not valid or not that of `run`, the strategy is not available here, or the ranks'
            settings differ.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[Any, Any], Tensor],
        *,
        run: Run | None = None,
        strategy: str | Strategy = "auto",
        config: TrainerConfig | None = None,
        metrics: Mapping[str, Metric] | None = None,
        lr_scheduler: LRScheduler | None = None,
        lr_scheduler_per: str = "update",
        callbacks: Sequence[Callback] = (),
        output: str | Path | None = "auto",
        progress: bool = True,
        checkpoint: CheckpointConfig | None = None,
    ) -> None:
        self.config = _settings_on(run, strategy, config) if run is not None else config or TrainerConfig()
        self.loss = loss
        self.metrics = dict(metrics or {})
        self._users_schedule = UsersSchedule(lr_scheduler, lr_scheduler_per) if lr_scheduler is not None else None
        self.run = run or Run(strategy, self.config)
        """The run that this loop uses."""
        self.strategy, self.world = self.run.strategy, self.run.world
        check_consistency(self.strategy, describe_settings(self.config))
        self.model = model
        """The model itself, never a wrapper; its `state_dict` is what a checkpoint saves."""
        record = [RunRecord(output)] if output is not None else []
        shown = [Progress(self.config.log_every_s)] if progress else []
        self.callbacks: list[Callback] = [*record, *callbacks, *shown]
        if isinstance(loss, nn.Module):
            loss.to(self.world.device)  # its class weights, say
        if self.config.channels_last and not self.strategy.shards:  # shards are rows, and rows want NCHW
            to_channels_last(model, optimizer)
        self._forward, self.optimizer = self.run.prepare(model, optimizer)
        self._checkpoint, self._autocast = checkpoint, self.run.autocast()
        self._scaler = torch.amp.GradScaler(self.world.device.type) if self.config.precision == "fp16" else None
        self.checkpoints: Checkpoints | None = None
        """The checkpoints of the fit, once it has begun; None without `checkpoint`."""

    def fit(self, train: Dataset[Any], validation: Dataset[Any] | None = None, *, epochs: int) -> list[EpochRecord]:
        """Train for `epochs` epochs, evaluating on `validation` after each. Collective.

        With a `checkpoint` it goes on where an earlier fit stopped, and also returns the records of the earlier fit.

        Args:
            train: `InMemory`, or any map-style dataset of (input, target) pairs.
            validation: evaluated after each epoch; the same kinds of dataset.

        Returns:
            One record per epoch, the same on every rank.

        Raises:
            ConfigError: `epochs` is not positive, a dataset is empty, they differ between ranks, or a checkpoint does
                not fit.
            TrainerError: the loss is no longer a finite number, or a checkpoint cannot be written.
        """
        if epochs < 1:
            raise ConfigError(f"epochs is {epochs}; it must be at least 1")
        loader = self._loader(train)
        validator = self._loader(validation, training=False) if validation is not None else None
        check_consistency(self.strategy, {"epochs": epochs})
        torch.manual_seed(mix_seeds(self.config.seed, self.world.rank))
        schedule = make_schedule(
            self.config, world_size=self.world.size, updates_per_epoch=loader.updates, epochs=epochs
        )
        self._learning_rate = self._users_schedule or LearningRate(self.optimizer, schedule)
        state = self._state = FitState(self.strategy, self.callbacks)
        checkpoints = self.checkpoints = self._make_checkpoints(has_validation=validation is not None)
        try:
            self._begin(epochs, loader)
            for epoch in self.run.epochs(epochs):
                record = self._train_epoch(loader, epoch + 1, validator)
                loss = record.validation.metrics["loss"] if record.validation else record.train_loss
                self._learning_rate.after_epoch(loss)
                state.records.append(record)
                self._notify("on_epoch_end", record)
                if checkpoints is not None and record.validation is not None and checkpoints.config.best is not None:
                    checkpoints.rate(record.validation.metrics[checkpoints.config.metric])
        finally:
            self._learning_rate.restore()
            if checkpoints is not None:
                checkpoints.close()
        self._notify("on_fit_end", state.records)
        return state.records

    def _make_checkpoints(self, *, has_validation: bool) -> Checkpoints | None:
        if self._checkpoint is None:
            return None
        if self.checkpoints is not None:
            raise ConfigError("checkpoints belong to one fit; make another Trainer, with a folder of its own")
        metrics = ("loss", *self.metrics) if has_validation else ()
        if self._checkpoint.best is not None and self._checkpoint.metric not in metrics:
            valid = ", ".join(metrics) or "none without a validation"
            raise ConfigError(f"checkpoints are to be compared by {self._checkpoint.metric!r}; valid are {valid}")
        users = self._users_schedule
        kept: dict[str, Any] = {"fit": self._state, "learning rate": users.scheduler if users else self._learning_rate}
        if self._scaler:
            kept["scaler"] = self._scaler
        return self.run.checkpoints(**self._checkpoint.as_dict(), state=kept)

    def evaluate(self, data: Dataset[Any]) -> Evaluation:
        """Return the means of the loss and of every metric over `data`, each sample counted once. Collective."""
        return self._evaluate(self._loader(data, training=False))

    def _evaluate(self, loader: ShardedLoader) -> Evaluation:
        self.run.average_weights()
        self.strategy.broadcast_buffers(self.model)
        sums = torch.zeros(1 + len(self.metrics), dtype=torch.float64, device=self.world.device)
        samples = 0
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        with torch.no_grad(), self._autocast:
            for step in loader.evaluation_steps():
                inputs, targets = self._pair(step)
                outputs = self.model(inputs)
                values = [self.loss(outputs, targets).double() * step.count]
                values += [metric(outputs, targets) for metric in self.metrics.values()]
                for total, value in zip(sums, values, strict=True):
                    total += value  # a view: each batch is added on the device, which nothing waits for
                samples += step.count
        for module, training in modes:  # as before: the user may have set some to eval
            module.training = training
        counts = torch.tensor([samples], dtype=torch.float64, device=self.world.device)
        *totals, count = self.strategy.all_reduce(torch.cat([sums, counts])).tolist()
        means = {name: total / max(count, 1) for name, total in zip(("loss", *self.metrics), totals, strict=True)}
        return Evaluation(metrics=means, evaluated=round(count), samples=loader.plan.samples)

    def _loader(self, data: Dataset[Any], *, training: bool = True) -> ShardedLoader:
        if is_stream(data):
            raise ConfigError(
                f"Trainer takes map-style datasets, and {type(data).__name__} can only be iterated over; "
                "run.loader takes it, for a loop of your own (trainer.init)"
            )
        config = self.config
        whole, workers = config.global_batch_size if training else None, config.num_workers
        size = config.batch_size if training else config.eval_batch_size or config.batch_size
        per_rank = size if whole is None else None
        order = config.shuffle if training else None
        loader = self.run.loader(
            data, per_rank, global_batch_size=whole, training=training, shuffle=order, num_workers=workers
        )
        return cast(ShardedLoader, loader)

    def _train_epoch(self, loader: ShardedLoader, epoch: int, validator: ShardedLoader | None) -> EpochRecord:
        state = self._state
        opens_update, update = True, (epoch - 1) * loader.updates + loader.updates_before(loader.start)
        state.begin_epoch(is_resumed=loader.start > 0)
        if not self.model.training:  # else each module stays in the mode that the user has chosen for it
            self.model.train()
        self.optimizer.zero_grad()
        next_event = time.perf_counter() + _PROGRESS_INTERVAL_S
        for step in loader.steps():
            if opens_update:
                self._learning_rate.before_update(update)
            loss = self._step(step)
            if step.count:
                state.add(loss, step.count)
            opens_update = step.closes_update
            if opens_update:
                update += 1
                self._update()
                self._report_update(loader, epoch)
            if time.perf_counter() >= next_event:
                self._report_progress(loader, epoch)
                next_event = time.perf_counter() + _PROGRESS_INTERVAL_S
        self._finite(state.local_loss(), epoch, loader.epoch_samples)
        train_loss, samples = state.mean_loss()
        return EpochRecord(
            epoch=epoch,
            epochs=self._context.epochs,
            train_loss=train_loss,
            samples=samples,
            seconds=state.seconds,
            learning_rate=state.learning_rate,
            world_size=self.world.size,
            updates=state.updates,
            validation=self._evaluate(validator) if validator is not None else None,
        )

    def _step(self, step: Step) -> Tensor:
        """Run the forward and the backward pass; return the local mean loss."""
        inputs, targets = self._pair(step)
        with self._autocast:
            loss = self.loss(self._forward(inputs), targets)
        self.run.backward(self._scaler.scale(loss) if self._scaler else loss)
        return loss

    def _update(self) -> None:
        """Apply the all-reduced gradients and reset them."""
        if self.config.clip_norm is not None:
            if self._scaler:
                self._scaler.unscale_(self.optimizer)
            self.run.clip_grad_norm_(parameters_of(self.optimizer), self.config.clip_norm)
        if self._scaler:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._state.updates += 1
        self._state.learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self._learning_rate.after_update()

    def _pair(self, step: Step) -> tuple[Any, Any]:
        """Return a batch's inputs and targets; raise `ConfigError` for batches of another kind."""
        if not isinstance(step.batch, tuple | list) or len(step.batch) != 2:
            raise ConfigError(
                "Trainer takes batches of (inputs, targets), and this dataset's are of type "
                f"{type(step.batch).__name__}; trainer.init() is for a loop of your own, which takes any batch"
            )
        inputs, targets = step.batch
        if self.config.channels_last and isinstance(inputs, Tensor) and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, targets

    def _report_progress(self, loader: ShardedLoader, epoch: int) -> None:
        event = ProgressEvent(
            epoch=epoch,
            epochs=self._context.epochs,
            done=loader.taken,
            samples=loader.epoch_samples,
            loss=self._finite(self._state.local_loss(), epoch, loader.taken),
            seconds=self._state.seconds,
        )
        self._notify("on_progress", event)

    def _report_update(self, loader: ShardedLoader, epoch: int) -> None:
        every, update = self.config.log_every_updates, self._state.updates
        if not every or (update % every and loader.taken < loader.epoch_samples):
            return
        samples, rate = (epoch - 1) * loader.epoch_samples + loader.taken, self._state.learning_rate
        loss = self._finite(self._state.local_loss_since_last(), epoch, loader.taken)
        record = UpdateRecord(update=update, epoch=epoch, samples=samples, loss=loss, learning_rate=rate)
        self._notify("on_update", record)

    def _finite(self, loss: float, epoch: int, samples: int) -> float:
        """Return this rank's mean loss; raise `TrainerError` where it is not a finite number."""
        if not math.isfinite(loss):
            rate = self.optimizer.param_groups[0]["lr"]
            raise TrainerError(
                f"the loss turned {loss} in epoch {epoch}, by sample {samples:,}, at learning rate {rate:g}; "
                "lower the learning rate, or clip the gradient (clip_norm)"
            )
        return loss

    def _begin(self, epochs: int, loader: ShardedLoader) -> None:
        """Tell the callbacks that a fit begins, or at which update it goes on."""
        resumed = self.checkpoints.resumed if self.checkpoints is not None else None
        taken, before = resumed.positions[0]["taken"] if resumed is not None else 0, len(self._state.records)
        update, last = before * loader.updates + loader.updates_before(taken), epochs * loader.updates
        self._context = FitContext(
            world=self.world,
            model=self.model,
            optimizer=self.optimizer,
            epochs=epochs,
            config=self.config,
            strategy_name=type(self.strategy).__name__,
            description=self.strategy.description,
            learning_rate=self._learning_rate.describe(update if update < last else 0),
            tuning=self.strategy.tuning,
            broadcast_object=self.strategy.broadcast_object,
            checkpoints=str(self._checkpoint.folder) if self._checkpoint is not None else "",
        )
        self._notify("on_fit_start")

    def _notify(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self._context, *arguments)


def _settings_on(run: Run, strategy: str | Strategy, config: TrainerConfig | None) -> TrainerConfig:
    """Return the settings of a Trainer that is given a run; raise `ConfigError` for others than the run's."""
    if strategy not in ("auto", run.strategy) or config not in (None, run.config):
        raise ConfigError(
            "Trainer was given run, and another strategy or config beside it; give both to trainer.init(strategy, "
            "config=…), which takes a TrainerConfig as well"
        )
    if isinstance(run.config, TrainerConfig):
        return run.config
    return TrainerConfig(**{name: getattr(run.config, name) for name in RunConfig.__dataclass_fields__})

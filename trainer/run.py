"""Run: the handle on the job that this process was launched into, for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset

from trainer.checkpoint.run.checkpoints import Checkpoints
from trainer.checkpoint.run.contents import Contents
from trainer.cluster.output import print_line
from trainer.config import CheckpointConfig, RunConfig, settings_from
from trainer.data.base import NOT_GIVEN, Loader
from trainer.data.loader import ShardedLoader
from trainer.data.stream import StreamLoader
from trainer.errors import ConfigError, TrainerError
from trainer.files import save_atomically
from trainer.loop.collectives import all_reduce
from trainer.loop.joining import join
from trainer.loop.loaders import Loaders
from trainer.loop.metrics import Mean
from trainer.loop.random_numbers import draw_apart
from trainer.loop.updates import Updates
from trainer.models.sharded import gather, whole_state
from trainer.report.loop_report import LogFunction, LoopReport, Settings
from trainer.report.run_record import describe_run
from trainer.strategies.base import Strategy

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def init(strategy: str | Strategy = "auto", *, config: RunConfig | None = None, **settings: Any) -> Run:
    """Join the job that this process was launched into, and return the handle on it. Collective.

    Args:
        strategy: a name out of `trainer.strategies.NAMES`, of which "auto" chooses by launcher; or a strategy.
        config: the settings as a whole. Of a `TrainerConfig`, `Trainer(…, run=run)` takes those of the loop as well.
        settings: the fields of `RunConfig` instead, as in `init(precision="bf16", accumulate=4)`.

    Raises:
        ConfigError: a setting is not valid, or the strategy is not available here.
    """
    if config is None:
        config = settings_from(RunConfig, "init", others=("strategy", "config"), **settings)
    elif settings:
        raise ConfigError(f"init takes config, or settings one by one; {min(settings)} was given beside config")
    return Run(strategy, config)


class Run:
    """One rank's handle on the job. It behaves the same under every launcher and every strategy.

    All methods but `print`, `log`, `log_to`, `save`, `mean`, `progress`, `autocast`, `unwrap` and `epochs` are
    collective: every rank calls them, in the same order.

    Args:
        strategy: a name out of `trainer.strategies.NAMES`, or a strategy.
        config: see `RunConfig`.
    """

    def __init__(self, strategy: str | Strategy, config: RunConfig) -> None:
        self.config = config
        self.strategy = join(strategy, config)
        self.world = world = self.strategy.world
        # By the names that Fabric and Accelerate give them.
        self.rank, self.world_size, self.local_rank = world.rank, world.size, world.local_rank
        self.is_root, self.device, self.host = world.is_root, world.device, world.host
        self._updates = Updates(self.strategy, config)
        facts = {"description": self.strategy.description, "tuning": dict(self.strategy.tuning)}
        self._report = LoopReport(self.world, {"config": config.as_dict(), **facts})
        self._loaders = Loaders(self.strategy, config, self._updates.on_batch, self)
        self._checkpoints: Checkpoints | None = None

    @property
    def sync_gradients(self) -> bool:
        """Whether the batch that was drawn last ends an update: clip, step and zero the gradients then."""
        return self._updates.batches.closes_update

    @property
    def batch_samples(self) -> int:
        """Samples in the training batch that was drawn last, for sums of one's own; 0 for a padding batch."""
        return self._updates.batches.current.count

    def prepare(self, *objects: nn.Module | Optimizer) -> Any:
        """Prepare models, and optimizers over their parameters, for training with all other ranks.

        Models are moved to this rank's device and get rank 0's weights; optimizers get rank 0's state, and their
        `step()` applies the mean gradient over all ranks. An optimizer stays the object that it was, so a learning
        rate scheduler that was made for it before, or is made afterwards, works. Ranks that were seeded alike draw
        random numbers of their own from now on; rank 0's are those of one process.

        Returns:
            The models to call and the optimizers, in the order of the arguments; one alone is returned by itself.

        Raises:
            ConfigError: something else was given, an optimizer holds a parameter of no model, or ranks differ.
        """
        objects = tuple(self.unwrap(one) if isinstance(one, nn.Module) else one for one in objects)
        models = [one for one in objects if isinstance(one, nn.Module)]
        optimizers = [one for one in objects if isinstance(one, Optimizer)]
        if len(models) + len(optimizers) < len(objects):
            kinds = ", ".join(type(one).__name__ for one in objects)
            raise ConfigError(f"prepare takes models and optimizers, and was given {kinds}; run.loader takes datasets")
        self.average_weights()  # a model that is prepared again may be within a round of sync_every
        self._updates.prepared.check_parameters(models, optimizers)
        prepared: dict[int, Any] = {id(one): one for one in optimizers}
        for model in models:
            prepared[id(model)] = self._updates.add_model(model)
        for optimizer in optimizers:
            self._updates.add_optimizer(optimizer)
        self._report.optimizers.update(dict.fromkeys(optimizers))
        draw_apart(self.strategy, self.config.seed)
        results = tuple(prepared[id(one)] for one in objects)
        return results[0] if len(results) == 1 else results

    @overload
    def loader(
        self, dataset: IterableDataset[Any], batch_size: int | None = NOT_GIVEN, *,
        global_batch_size: int | None = None, training: bool = True, **options: Any,
    ) -> StreamLoader: ...  # fmt: skip
    @overload
    def loader(
        self, dataset: Dataset[Any] | Sequence[Any], batch_size: int | None = NOT_GIVEN, *,
        global_batch_size: int | None = None, training: bool = True, **options: Any,
    ) -> ShardedLoader: ...  # fmt: skip

    def loader(
        self,
        dataset: Any,
        batch_size: int | None = NOT_GIVEN,
        *,
        global_batch_size: int | None = None,
        training: bool = True,
        **options: Any,
    ) -> Loader:
        """Return a loader of this rank's batches, on its device.

        Arguments and options are those of `ShardedLoader`; for an iterable dataset those of `StreamLoader`.

        Raises:
            ConfigError: an argument is not valid, or the datasets differ in size between ranks.
        """
        options["global_batch_size"] = global_batch_size
        return self._loaders.make(dataset, batch_size, training=training, **options)

    def backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
        *,
        samples: float | None = None,
    ) -> None:
        """Run the backward pass; if it closes an update, the gradients are the mean over all ranks when it returns.

        The loss is a mean over a batch, and is weighted by that batch's samples: the mean over ranks is then that over
        samples, in uneven last batches too.

        Args:
            loss: a mean over samples, as a tensor without dimensions; with others where `gradient` is given.
            gradient, retain_graph, inputs: as those of `torch.Tensor.backward`.
            create_graph: is refused: mean gradients have no graph.
            samples: how many samples (tokens, steps of an episode, …) the loss is a mean over, where no loader of this
                run says so. Passes within `no_sync` before it belong to the same update. Every rank gives them.

        Raises:
            TrainerError: parameters were unfrozen after `prepare`, the loss is of batches that count differently, or
                ranks have parted: their weights differ, or one has skipped a batch; or `create_graph` is true.
        """
        if create_graph:
            raise TrainerError(
                "run.backward(loss, create_graph=True): the mean of all ranks' gradients has no graph; for a loss that "
                "depends on gradients, compute them with torch.autograd.grad(..., create_graph=True), and give "
                "run.backward the loss"
            )
        options = {"gradient": gradient, "retain_graph": retain_graph, "inputs": inputs}
        self._updates.backward(loss, samples, **options)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the context for passes whose gradients stay on this rank until a later backward pass."""
        return self._updates.no_sync()

    def synchronize(self, *optimizers: Optimizer) -> None:
        """Make gradients that `no_sync` has kept on this rank the mean over all ranks; all others are that already.

        Args:
            optimizers: are checked to have been prepared.

        Raises:
            ConfigError: an optimizer was not prepared, or the reduction is adasum, which combines finished steps.
        """
        self._updates.synchronize(optimizers)

    def clip_grad_norm_(self, target: nn.Module | Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Scale the mean gradients so that their 2-norm is at most `max_norm`; return the norm before.

        `target` is a model, or its parameters.
        """
        parameters = list(target.parameters() if isinstance(target, nn.Module) else map(self.strategy.current, target))
        self._updates.synchronize()
        return gather(torch.nn.utils.clip_grad_norm_(parameters, max_norm))

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for the forward pass and the loss under the precision of `init`."""
        dtype = _AUTOCAST.get(self.config.precision)
        return torch.autocast(self.device.type, dtype=dtype) if dtype else nullcontext()

    def average_weights(self) -> None:
        """Give all ranks the same weights, where `sync_every` lets them differ, to use them between two updates.

        The end of a loader's epoch does so itself, and so do checkpoints and `Trainer.evaluate`.
        """
        for synchronizer in self._updates.models.values():
            synchronizer.settle()

    def all_reduce(self, value: Tensor | float, reduction: str = "mean") -> Tensor:
        """Return the mean or the sum of `value` over all ranks, as a new tensor on this rank's device.

        Booleans are counted, as integers.

        Raises:
            ConfigError: `reduction` is neither "mean" nor "sum".
        """
        return all_reduce(self.strategy, value, reduction)

    def mean(self) -> Mean:
        """Return a running mean over the samples of all ranks, of a loss say, which is all-reduced when it is read."""
        return Mean(self.all_reduce, lambda: self.batch_samples if self._updates.batches.has_loader else 1, self.device)

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of the ranks; anything that can be pickled."""
        return self.strategy.all_gather_object(value)

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return rank `root`'s value on every rank; anything that can be pickled."""
        return self.strategy.broadcast_object(value, root=root)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.strategy.barrier()

    def print(self, *values: Any) -> None:
        """Print on rank 0."""
        if self.is_root:
            print_line(" ".join(map(str, values)))

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model that was given to `prepare`, for what `prepare` has returned."""
        if isinstance(model, nn.DataParallel) and model.module in self._updates.models:
            return cast(nn.Module, model.module)
        return model

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return a model's whole `state_dict` in host memory, as plain PyTorch loads it, on rank 0; {} on others."""
        self.average_weights()
        return whole_state(self.unwrap(model), keep=self.is_root)

    def save(self, value: Any, path: str | Path) -> None:
        """Save what `torch.save` takes on rank 0, whole or not at all; other ranks do nothing, and do not wait.

        Raises:
            TrainerError: rank 0 cannot write it.
        """
        if self.is_root:
            save_atomically(Path(path), value)

    def epochs(self, count: int, *, start: int = 0) -> Iterator[int]:
        """Yield the epochs' numbers, from `start` to `count` - 1.

        With a `start`, loaders that were made before go on with the order of these epochs, as a run that was not
        interrupted does.

        Raises:
            ConfigError: `count` is not positive, or `start` is not within it.
        """
        if count < 1:
            raise ConfigError(f"epochs is {count}; it must be at least 1")
        if not 0 <= start <= count:
            raise ConfigError(f"start is {start}; it must be from 0 to the number of epochs, {count}")
        if start > 0 and (self._checkpoints is None or self._checkpoints.resumed is None):
            self._loaders.begin_at(start)
        return self._report.count(range(start, count), self._checkpoints.count if self._checkpoints else iter)

    def checkpoints(self, folder: str | Path, *, state: Mapping[str, Any] | None = None, **options: Any) -> Checkpoints:
        """Save this run beside its training from now on, and go on where an earlier one stopped. Collective.

        Models and optimizers that were prepared are kept, and the positions of the training's loaders, the epoch of
        `epochs`, the random numbers, and the scale under fp16. Call it before the loop, when everything is there.

        Args:
            folder: on a disk of each host, or on a file system that hosts share.
            state: what else is kept, by name: objects with `state_dict` and `load_state_dict`, such as schedulers, or
                dicts of plain data. Every rank calls `state_dict`; rank 0's result counts.
            options: the other fields of `CheckpointConfig`, as in `every_s=60, keep=3, resume="auto"`.

        Raises:
            ConfigError: an option is not valid, the checkpoint does not fit this run, or the disk is too small.
            TrainerError: the folder cannot be written, or another job uses it.
        """
        config = settings_from(CheckpointConfig, "run.checkpoints", folder=folder, **options)
        if self._checkpoints is not None:
            self._checkpoints.close()
        own = self._updates
        contents = Contents(own, state or {})
        facts = {"config": self.config.as_dict(), **describe_run(self.world)}
        self._checkpoints = Checkpoints(config, self.strategy, contents, facts)
        own.completed.count = self._checkpoints.updates
        for loader in self._loaders.training:
            self._checkpoints.watch(loader)
        self._loaders.on_made = self._checkpoints.watch
        return self._checkpoints

    def progress(self, loader: Loader) -> Iterator[Any]:
        """Yield the loader's batches, and show on rank 0 how far they are: a bar on a terminal, lines elsewhere."""
        return self._report.watch(loader)

    def record(
        self, folder: str | Path = "auto", *, settings: Settings | None = None, tensorboard: bool = False
    ) -> Path:
        """Make a folder for this run, with settings.json, on rank 0; return it on every rank. `log` writes to it.

        Args:
            folder: must not hold a run yet, unless it is this one, which `checkpoints` (called before) goes on with;
                "auto" makes `runs/<script>-<date>-<time>`.
            settings: what else belongs into settings.json, such as the script's arguments.
            tensorboard: also write TensorBoard events there.

        Raises:
            TrainerError: rank 0 cannot write.
        """
        saved_in = str(self._checkpoints.config.folder) if self._checkpoints is not None else ""
        return self._report.open(folder, settings, self.broadcast, tensorboard=tensorboard, checkpoints=saved_in)

    def log_to(self, function: LogFunction) -> None:
        """Have `log` hand its values to a function as well, a tracker's say, on rank 0 only.

        Args:
            function: is called with the values, as numbers by name, and the step. What it raises, `log` raises.
        """
        self._report.log_to(function)

    def log(self, values: Mapping[str, Tensor | float], *, step: int) -> None:
        """Hand rank 0's values to the folder of `record`, to `progress` and to `log_to`. Waits for the device."""
        self._report.log(values, step)

    def close(self) -> None:
        """Leave the job. A script that ends leaves it by itself."""
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._report.close()
        self.strategy.close()

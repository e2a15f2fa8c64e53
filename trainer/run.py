"""Run: a process's handle on its job, for a training loop that you write yourself."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, Unpack, cast, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from trainer.checkpoint.run.checkpoints import Checkpoints
from trainer.checkpoint.run.contents import Contents
from trainer.cluster.output import print_line
from trainer.config import CheckpointConfig, RunConfig, RunSettings, settings_from
from trainer.data.base import NOT_GIVEN, CommonOptions, Loader, is_stream
from trainer.data.given import arguments_from
from trainer.data.loader import ShardedLoader
from trainer.data.order import Drawn, DrawnBatches, generators_of
from trainer.data.shard_plan import mix_seeds
from trainer.data.stream import StreamLoader
from trainer.errors import ConfigError, TrainerError
from trainer.files import save_atomically
from trainer.loop.batches import Batches
from trainer.loop.consistency import check_consistency, warn_of_other_data
from trainer.loop.gathering import gather_rows
from trainer.loop.joining import join
from trainer.loop.metrics import Mean
from trainer.loop.objects import packed, unpacked
from trainer.loop.prepared import Prepared
from trainer.loop.random_numbers import draw_apart
from trainer.loop.updates import Updates
from trainer.models.global_batch import GlobalBatch
from trainer.models.sharded import gather, whole_state
from trainer.report.loop_report import LogFunction, LoopReport, Settings
from trainer.report.run_record import describe_run
from trainer.strategies.base import Strategy
from trainer.watch.failure import report_failures

_T1 = TypeVar("_T1", bound=nn.Module | Optimizer)
_T2 = TypeVar("_T2", bound=nn.Module | Optimizer)
_T3 = TypeVar("_T3", bound=nn.Module | Optimizer)
_T4 = TypeVar("_T4", bound=nn.Module | Optimizer)

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Types that not every transport can add, or that a sum over ranks may overflow, each with the type that is sent.
_SENT_AS = {
    **dict.fromkeys((torch.bool, torch.uint8, torch.int8, torch.int16), torch.int64),
    torch.bfloat16: torch.float32,
}


_CUT = (
    "trainer: WARNING: run.all_gather(tensor) cuts the gradient: other ranks' rows are constants in this rank's loss; "
    "give differentiable=True, or tensor.detach() if that is meant"
)


def init(strategy: str | Strategy = "auto", *, config: RunConfig | None = None, **settings: Unpack[RunSettings]) -> Run:
    """Join the job that this process was launched into, and return its handle. Collective.

    Args:
        strategy: a name from `trainer.strategies.NAMES` ("auto" chooses by launcher), or a `Strategy`.
        config: all settings at once. From a `TrainerConfig`, `Trainer(…, run=run)` also takes the loop's settings.
        settings: the fields of `RunConfig`, in place of `config`: `init(precision="bf16", accumulate=4)`.

    Raises:
        ConfigError: a setting is not valid, or the strategy is not available here.
    """
    report_failures()
    if isinstance(strategy, RunConfig):
        raise ConfigError(f"init's strategy is a {type(strategy).__name__}; settings are given as init(config=...)")
    if config is None:
        config = settings_from(RunConfig, "init", others=("strategy", "config"), **settings)
    elif settings:
        raise ConfigError(f"init takes config, or settings one by one; {min(settings)} was given beside config")
    return Run(strategy, config)


class _LoaderOptions(CommonOptions, total=False):
    """The options of `Run.loader` for datasets of both kinds; an option of the other kind is refused at run time."""

    global_batch_size: int | None
    drop_last: bool
    shuffle: bool | None
    sampler: Drawn | None
    batch_sampler: DrawnBatches | None
    already_sharded: bool


class Run:
    """One rank's handle on the job. It behaves the same under every launcher and every strategy.

    All methods but `print`, `log`, `log_to`, `save`, `mean`, `progress`, `autocast`, `unwrap` and `epochs` are
    collective: every rank has to call them, in the same order.

    Args:
        strategy: a name from `trainer.strategies.NAMES`, or a `Strategy`.
        config: see `RunConfig`.
    """

    def __init__(self, strategy: str | Strategy, config: RunConfig) -> None:
        self.config = config
        self.strategy = join(strategy, config)
        self.world = world = self.strategy.world
        # These names are those of Fabric and Accelerate.
        self.rank, self.world_size, self.local_rank = world.rank, world.size, world.local_rank
        self.is_root, self.device, self.host = world.is_root, world.device, world.host
        self._global_batch = GlobalBatch(self.strategy.sum_statistics)
        self._batches = Batches(world, config.accumulate, self._global_batch)
        self._prepared = Prepared(self.strategy, config, self._global_batch)
        self._updates = Updates(self.strategy, config, self._prepared, self._batches)
        self._has_warned = False
        facts = {"description": self.strategy.description, "tuning": dict(self.strategy.tuning)}
        self._report = LoopReport(self.world, {"config": config.as_dict(), **facts})
        self._epoch = self._training_loaders = 0
        """The current epoch of `epochs`, and how many training loaders were made before the loop and in this epoch."""
        self._loaders: list[weakref.ref[Loader]] = []
        """The loaders in the order in which they were made. A loader's index is its number, the same on every rank."""
        self._given: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
        """The DataLoaders of the script that were prepared."""
        self._checkpoints: Checkpoints | None = None

    @property
    def sync_gradients(self) -> bool:
        """Whether the most recent batch ends an update: only then clip, step and zero the gradients."""
        return self._batches.current.closes_update

    @property
    def batch_samples(self) -> int:
        """Number of samples in the most recent training batch, to weight your own sums; 0 for a padding batch."""
        return self._batches.current.count

    @overload
    def prepare(self, first: _T1, /) -> _T1: ...
    @overload
    def prepare(self, first: DataLoader[Any], /, *, per_rank: bool = False) -> Loader: ...
    @overload
    def prepare(self, first: _T1, second: _T2, /) -> tuple[_T1, _T2]: ...
    @overload
    def prepare(
        self, first: _T1, second: _T2, third: DataLoader[Any], /, *, per_rank: bool = False
    ) -> tuple[_T1, _T2, Loader]: ...
    @overload
    def prepare(
        self, first: _T1, second: _T2, third: DataLoader[Any], /, *, evaluation: DataLoader[Any], per_rank: bool = False
    ) -> tuple[_T1, _T2, Loader, Loader]: ...
    @overload
    def prepare(self, first: _T1, second: _T2, third: _T3, /) -> tuple[_T1, _T2, _T3]: ...
    @overload
    def prepare(self, first: _T1, second: _T2, third: _T3, fourth: _T4, /) -> tuple[_T1, _T2, _T3, _T4]: ...
    @overload
    def prepare(
        self,
        *objects: nn.Module | Optimizer | DataLoader[Any],
        evaluation: DataLoader[Any] | None = None,
        per_rank: bool = False,
    ) -> Any: ...

    def prepare(
        self,
        *objects: nn.Module | Optimizer | DataLoader[Any],
        evaluation: DataLoader[Any] | None = None,
        per_rank: bool = False,
    ) -> Any:
        """Prepare models, their optimizers and DataLoaders for training together with all other ranks.

        Models are moved to this rank's device and get rank 0's weights; optimizers get rank 0's state, and their
        `step()` applies the mean gradient over all ranks. An optimizer stays the same object, so a learning rate
        scheduler works whether it is made before or after. Ranks that were seeded alike draw different random numbers
        from here on; rank 0 draws those that a single process would.

        A DataLoader's place takes a loader of its dataset, with its sampler, `collate_fn`, workers and `drop_last`. Its
        batch size is that of all ranks together, so that they compute what a single process computes. Its order is
        that of a single process where it or its sampler has a generator; else it follows seed and epoch. The batches
        of a `batch_sampler` of another class than PyTorch's go to one rank each.

        Args:
            evaluation: a DataLoader for evaluations, whose loader is returned last; see `Loader`.
            per_rank: whether the batch size of DataLoaders is that of each rank.

        Returns:
            The models to call, the optimizers and the loaders, in the order of the arguments; one alone as it is.

        Raises:
            ConfigError: an argument is none of these, an optimizer has a parameter that belongs to no prepared model,
                a batch has fewer samples than there are ranks, or the ranks' arguments differ.
        """
        objects = tuple(self.unwrap(item) if isinstance(item, nn.Module) else item for item in objects)
        models = [item for item in objects if isinstance(item, nn.Module)]
        optimizers = [item for item in objects if isinstance(item, Optimizer)]
        loaders = [item for item in objects if isinstance(item, DataLoader)]
        if len(models) + len(optimizers) + len(loaders) < len(objects):
            kinds = ", ".join(type(item).__name__ for item in objects)
            raise ConfigError(
                f"prepare takes models, optimizers and DataLoaders, and was given {kinds}; run.loader takes datasets"
            )
        self.average_weights()  # a model that is prepared again may be within a round of sync_every
        callable_models = self._updates.prepare(models, optimizers)
        self._report.optimizers.update(dict.fromkeys(optimizers))
        draw_apart(self.strategy, self.config.seed)
        given: dict[Any, Any] = {**callable_models}
        for item in loaders:
            given[item] = self._loader_of(item, training=True, per_rank=per_rank)
        results = [given.get(item, item) for item in objects]
        if evaluation is not None:
            results.append(self._loader_of(evaluation, training=False, per_rank=per_rank))
        return results[0] if len(results) == 1 else tuple(results)

    def _loader_of(self, given: DataLoader[Any], *, training: bool, per_rank: bool) -> Loader:
        """Return the loader that takes a DataLoader's place, and print what a batch is."""
        ranks, held = self.world_size, {*generators_of(given)}
        if any(held & {*generators_of(other)} for other in self._given if other is not given):
            raise ConfigError("two DataLoaders draw by one torch.Generator; give each its own, so that each can go on")
        self._given.add(given)
        loader = self.loader(**arguments_from(given, ranks=ranks, training=training, per_rank=per_rank))
        if training and ranks > 1 and self.is_root:
            size = f"{loader.step_size} {loader.unit}, {loader.step_size / ranks:.4g} per rank"
            print_line(f"trainer: a step of all ranks takes {size}", sys.stderr)
        return loader

    def loader(
        self,
        dataset: Dataset[Any] | Sequence[Any] | Iterable[Any],
        batch_size: int | None = NOT_GIVEN,
        *,
        training: bool = True,
        **options: Unpack[_LoaderOptions],
    ) -> Loader:
        """Return a loader of this rank's batches, on its device.

        Arguments and options are those of `ShardedLoader`; for an iterable dataset those of `StreamLoader`.

        Raises:
            ConfigError: an argument is not valid, or the datasets differ in size between ranks.
        """
        if from_run := {"seed", "accumulate"} & set(options):
            raise ConfigError(f"run.loader takes {min(from_run)} from the run; set it in trainer.init")
        kind: Any = StreamLoader if is_stream(dataset) or options.get("already_sharded") else ShardedLoader
        if self.strategy.shards and kind is StreamLoader and not training:
            raise ConfigError(
                "an iterable dataset has another number of evaluation steps on each rank, and under this strategy "
                "every forward pass is collective; give a dataset with a length, or training=True"
            )
        loader: Loader = kind(
            dataset,
            batch_size,
            training=training,
            seed=self.config.seed,
            accumulate=self.config.accumulate if training else 1,
            world=self.world,
            group=self,
            **options,
        )
        if training:
            if self._training_loaders:  # two datasets have different orders, as in a single process
                loader.seed = mix_seeds(self.config.seed, self._training_loaders)
            self._training_loaders, loader.epoch = self._training_loaders + 1, self._epoch
        loader.number = len(self._loaders)
        loader.observers.append(self._batches)
        self.strategy.follow_loader(loader)
        self._loaders.append(weakref.ref(loader))
        check_consistency(self.strategy, loader.must_agree)
        warn_of_other_data(self.strategy, loader)
        if training and self._checkpoints is not None:
            self._checkpoints.watch(loader)
        return loader

    def backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
        *,
        samples: float | None = None,
        reduction: str = "mean",
    ) -> None:
        """Run the backward pass. If it closes an update, it returns with the mean gradients over all ranks.

        The loss has to be a mean over its batch, or with `reduction="sum"` a sum. A mean is weighted by the batch's
        number of samples, so that the gradients are those of the mean over all ranks' samples, even if the last batches
        are uneven.

        Args:
            loss: the mean over samples, a scalar tensor; of any shape if `gradient` is given.
            gradient: as in `torch.Tensor.backward`.
            retain_graph: as in `torch.Tensor.backward`.
            inputs: as in `torch.Tensor.backward`.
            create_graph: must be false, because mean gradients have no graph.
            samples: how many samples (tokens, steps of an episode, …) the loss is a mean over, if its batch is not from
                a loader of this run. Earlier passes within `no_sync` belong to the same update. All ranks give it, or
                none does. With 0, nothing of this rank's pass counts, nor what other ranks' losses make of its rows.
            reduction: "sum" for a loss that is a sum over its batch: gradients are those of the sum over all ranks'
                samples.

        Raises:
            ConfigError: `reduction` is neither "mean" nor "sum", or `samples` is given for a sum.
            TrainerError: `create_graph` is true, parameters were unfrozen after `prepare`, the loss combines batches
                with different weights, or ranks have diverged: their weights differ, or a rank has skipped a batch.
        """
        if create_graph:
            raise TrainerError(
                "run.backward(loss, create_graph=True): the mean of all ranks' gradients has no graph; for a loss that "
                "depends on gradients, compute them with torch.autograd.grad(..., create_graph=True), and give "
                "run.backward the loss"
            )
        if reduction not in ("mean", "sum") or (reduction == "sum" and samples is not None):
            raise ConfigError(f"reduction is {reduction!r}; valid are mean, and without samples sum")
        self._updates.backward(loss, samples, reduction == "sum", gradient, retain_graph, False, inputs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context manager: backward passes within it leave their gradients to be sent by a later pass."""
        return self._updates.no_sync()

    def synchronize(self, *optimizers: Optimizer) -> None:
        """All-reduce gradients that `no_sync` has kept on this rank. All others are mean gradients already.

        Args:
            optimizers: if given, each is checked to have been prepared.

        Raises:
            ConfigError: an optimizer was not prepared.
        """
        self._updates.synchronize(optimizers)

    def clip_grad_norm_(self, target: nn.Module | Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Scale the mean gradients so that their 2-norm is at most `max_norm`; return the norm before scaling.

        `target` is a model, or its parameters.
        """
        parameters = list(target.parameters() if isinstance(target, nn.Module) else target)
        self._updates.synchronize()
        return gather(torch.nn.utils.clip_grad_norm_(parameters, max_norm))

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context for the forward pass and the loss, as `init`'s `precision` asks for."""
        dtype = _AUTOCAST.get(self.config.precision)
        return torch.autocast(self.device.type, dtype=dtype) if dtype else nullcontext()

    def average_weights(self) -> None:
        """Average the weights over all ranks if `sync_every` lets them differ, to use them between two updates.

        This happens by itself at the end of a loader's epoch, for checkpoints, and in `Trainer.evaluate`.
        """
        for synchronizer in self._prepared.models.values():
            synchronizer.average_weights()

    def all_reduce(self, value: Tensor | float, reduction: str = "mean") -> Tensor:
        """Return the mean or the sum of `value` over all ranks, as a new tensor on this rank's device.

        Booleans are summed as integers.

        Raises:
            ConfigError: `reduction` is neither "mean" nor "sum".
        """
        self._check_all_ranks_call("all_reduce")
        if reduction not in ("mean", "sum"):
            raise ConfigError(f"reduction is {reduction!r}; valid are mean, sum")
        dtype = torch.float64 if isinstance(value, float) else None
        local = torch.as_tensor(value, dtype=dtype, device=self.device).detach()
        if local.is_complex():
            return torch.view_as_complex(self.all_reduce(torch.view_as_real(local), reduction))
        sent = local.to(_SENT_AS.get(local.dtype, local.dtype)).clone(memory_format=torch.contiguous_format)
        total = self.strategy.all_reduce(sent)
        total = total if reduction == "sum" else total / self.world.size
        return total.to(local.dtype) if local.dtype == torch.bfloat16 else total

    def mean(self) -> Mean:
        """Return a running mean over all ranks' samples, of the loss for example. Only `read` communicates.

        Given to `checkpoints` in `state`, it continues where an epoch was interrupted.
        """
        return Mean(self.all_reduce, self._batches.weight_of_mean, self.device, self.is_root)

    def _check_all_ranks_call(self, name: str) -> None:
        """Raise `TrainerError` within a loop that other ranks leave earlier, which would not make this call."""
        if self._batches.in_uneven_evaluation:
            raise TrainerError(
                f"run.{name} is called within an evaluation of which ranks have unequal numbers of batches; call it "
                "after the loop, where run.mean() has added up what each rank has seen"
            )

    def all_gather(self, value: Any, *, differentiable: bool = False) -> list[Any]:
        """Return the values of all ranks, in rank order. A value is anything that can be pickled.

        Tensors on a GPU arrive on this rank's GPU.

        Args:
            differentiable: for a tensor of rows, whose number may differ between ranks: gradients pass through what is
                returned, so that a loss over all ranks' rows has the gradients of a single process. Its backward pass
                is collective as well. Other ranks see no rows of a rank that computes on a padding
                batch.

        Raises:
            ConfigError: `differentiable`, and the ranks' tensors differ in more than the number of rows.
        """
        self._check_all_ranks_call("all_gather")
        if differentiable:
            return gather_rows(value, self._global_batch, self.strategy)
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled() and not self._has_warned:
            self._has_warned = True
            if self.is_root:
                print_line(_CUT, sys.stderr)
        sent = self.strategy.all_gather_object(packed(value, self.world))
        return [unpacked(item, self.world) for item in sent]

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return rank `root`'s value on every rank. A value is anything that can be pickled.

        Tensors on a GPU arrive on this rank's GPU.
        """
        self._check_all_ranks_call("broadcast")
        sent = self.strategy.broadcast_object(packed(value, self.world) if self.rank == root else None, root=root)
        return value if self.rank == root else unpacked(sent, self.world)

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        self._check_all_ranks_call("barrier")
        self.strategy.barrier()

    def print(self, *values: Any) -> None:
        """Print on rank 0."""
        if self.is_root:
            print_line(" ".join(map(str, values)))

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model that was given to `prepare`; takes what `prepare` returned for it."""
        if isinstance(model, nn.DataParallel) and model.module in self._prepared.models:
            return cast(nn.Module, model.module)
        return model

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return, on rank 0, a model's whole `state_dict` in host memory, as plain PyTorch loads it; {} elsewhere."""
        self.average_weights()
        return whole_state(self.unwrap(model), keep=self.is_root)

    def save(self, value: Any, path: str | Path) -> None:
        """Save a value by `torch.save` on rank 0, whole or not at all; other ranks return at once.

        The state of a model goes into a file `….safetensors` in that format, with all its names.

        Raises:
            TrainerError: rank 0 cannot write it.
            ConfigError: what `….safetensors` is for is no state of a model, or the package is not installed.
        """
        if self.is_root:
            save_atomically(Path(path), value)

    def epochs(self, count: int, *, start: int = 0) -> Iterator[int]:
        """Yield the epochs' numbers, from `start` to `count` - 1.

        If `start` is given, loaders that were made before use the order of these epochs, as an uninterrupted run would.

        Raises:
            ConfigError: `count` is less than 1, or `start` is not from 0 to `count`.
        """
        if count < 1:
            raise ConfigError(f"epochs is {count}; it must be at least 1")
        if not 0 <= start <= count:
            raise ConfigError(f"start is {start}; it must be from 0 to the number of epochs, {count}")
        if start > 0 and (self._checkpoints is None or self._checkpoints.resumed is None):
            for loader in self._held_loaders():
                loader.epoch = start
        numbers = self._report.epochs = range(start, count)
        return self._in_each_epoch(self._checkpoints.count(numbers) if self._checkpoints else iter(numbers))

    def _in_each_epoch(self, epochs: Iterator[int]) -> Iterator[int]:
        """Yield epochs. A loader that is made within an epoch gets the order of an uninterrupted run."""
        before = self._epoch, self._training_loaders
        try:
            for epoch in epochs:
                self._epoch, self._training_loaders = epoch, before[1]
                yield epoch
        finally:  # also where the loop was left early
            self._epoch, self._training_loaders = before

    def checkpoints(self, folder: str | Path, *, state: Mapping[str, Any] | None = None, **options: Any) -> Checkpoints:
        """Save checkpoints while this run trains, and resume where an earlier run stopped. Collective.

        A checkpoint holds the prepared models and optimizers, the positions of the training loaders, the epoch of
        `epochs`, and the random states. Call this before the loop, after all of these exist.

        Args:
            folder: on a disk of each host, or on a file system that hosts share.
            state: what else to save, by name: objects with `state_dict` and `load_state_dict`, such as schedulers, or
                dicts of plain data. `state_dict` is called on every rank; rank 0's result is saved.
            options: the other fields of `CheckpointConfig`, as in `every_s=60, keep=3`.

        Raises:
            ConfigError: an option is not valid, or the checkpoint does not fit this run.
            TrainerError: the folder cannot be written, or another job uses it.
        """
        config = settings_from(CheckpointConfig, "run.checkpoints", folder=folder, **options)
        if self._checkpoints is None and self._report.has_named_folder:
            raise ConfigError(
                "run.record was called before run.checkpoints, so no later start could go on in its folder; call "
                "run.checkpoints first"
            )
        if self._checkpoints is not None:
            self._checkpoints.close()
        contents = Contents(self._prepared, state or {})
        facts = {"config": self.config.as_dict(), **describe_run(self.world)}
        self._checkpoints = Checkpoints(config, self.strategy, contents, facts)
        self._updates.completed = self._checkpoints.updates
        for loader in self._held_loaders():
            if loader.training:
                self._checkpoints.watch(loader)
        return self._checkpoints

    def _held_loaders(self) -> list[Loader]:
        """Return the loaders that are still in use, in the order in which they were made."""
        return [loader for made in self._loaders if (loader := made()) is not None]

    def progress(self, loader: Loader) -> Iterator[Any]:
        """Yield the loader's batches, and show the progress on rank 0: a bar on a terminal, lines elsewhere."""
        return self._report.watch(loader)

    def record(self, folder: str | Path = "auto", *, settings: Settings | None = None) -> Path:
        """Make this run's folder and its settings.json on rank 0; return the path on every rank. `log` writes to it.

        Args:
            folder: must not hold a run yet, except the run that `checkpoints`, called before, has resumed;
                "auto" makes `runs/<script>-<date>-<time>`.
            settings: what else to write into settings.json, such as the script's arguments.

        Raises:
            TrainerError: rank 0 cannot write.
        """
        saved_in = str(self._checkpoints.config.folder) if self._checkpoints is not None else ""
        return self._report.open(folder, settings, self.broadcast, saved_in)

    def log_to(self, function: LogFunction) -> None:
        """Have `log` also call a function with its values on rank 0, for an experiment tracker.

        Args:
            function: is called with a dict from name to number, and the step. What it raises, `log` raises.
        """
        self._report.functions.append(function)

    def log(self, values: Mapping[str, Tensor | float], *, step: int) -> None:
        """Give rank 0's values to the folder of `record`, to `progress` and to `log_to`. Waits for the device."""
        self._report.log(values, step)

    def close(self) -> None:
        """Leave the job. This happens by itself when the script ends."""
        if self._checkpoints is not None:
            self._checkpoints.close()
        self.strategy.close()

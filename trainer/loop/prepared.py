"""The models and optimizers of a run: checked, equal on all ranks, each model with a synchronizer of its gradients."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import call
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from trainer.config import FsdpConfig, RunConfig
from trainer.errors import ConfigError, TrainerError
from trainer.loop.consistency import (
    check_consistency,
    check_devices,
    describe_model,
    describe_optimizer,
    describe_settings,
    is_plain,
)
from trainer.loop.gradients import parameters_of
from trainer.models.global_batch import GlobalBatch
from trainer.models.sharded import current
from trainer.models.sync_batch_norm import GlobalBatchNorm, convert_sync_batch_norm
from trainer.strategies.base import Strategy
from trainer.strategies.gradients import GradientSynchronizer, Synchronizer

_ENDS: WeakKeyDictionary[nn.Module | Optimizer, list[Callable[[], object]]] = WeakKeyDictionary()


def at_end(prepared: nn.Module | Optimizer, end: Callable[[], object]) -> None:
    """Call `end` when this model or optimizer is prepared again, by the same run or by another."""
    _ENDS.setdefault(prepared, []).append(end)


def _end_earlier(prepared: nn.Module | Optimizer) -> None:
    """Detach a model or an optimizer from the run that prepared it before."""
    for end in _ENDS.pop(prepared, ()):
        end()


class Prepared:
    """The prepared models and optimizers of a `Run`.

    They are held weakly, so that a sweep over many models does not keep them all. So are the synchronizers, which the
    hooks on a model's parameters keep alive; a synchronizer that has nothing to do is made anew when it is asked for.
    """

    def __init__(self, strategy: Strategy, config: RunConfig, global_batch: GlobalBatch) -> None:
        self._strategy, self._config, self._global_batch = strategy, config, global_batch
        self._models: WeakKeyDictionary[nn.Module, _Model] = WeakKeyDictionary()
        self._optimizers: WeakKeyDictionary[Optimizer, PreparedOptimizer] = WeakKeyDictionary()
        self._numbers = itertools.count()
        self.active: list[weakref.ref[Synchronizer]] = []
        """The synchronizers of the prepared models, in the order of `prepare`, the same on all ranks: a model that
        was freed on this rank stays in the list until no rank holds it."""
        self.has_models = self.has_optimizers = False
        """Whether any model, and any optimizer, was prepared so far."""
        self.has_frozen = False
        """Whether a model with frozen parameters was."""
        self.backwards = 0
        """Backward passes so far."""

    @property
    def models(self) -> dict[nn.Module, Synchronizer]:
        """The models that somebody still holds, in the order of `prepare`."""
        return {model: known.synchronizer() or Synchronizer() for model, known in self._models.items()}

    @property
    def optimizers(self) -> dict[Optimizer, PreparedOptimizer]:
        """The optimizers that somebody still holds, in the order of `prepare`."""
        return dict(self._optimizers)

    @property
    def synchronizers(self) -> list[Synchronizer]:
        """The synchronizers that have something to do, of the models that somebody still holds."""
        return [*filter(None, map(call, self.active))]

    @property
    def numbered_models(self) -> dict[int, nn.Module]:
        """The models that have something to synchronize, by numbers that are the same on all ranks."""
        return {known.number: model for model, known in self._models.items() if known.number is not None}

    def is_between_updates(self) -> bool:
        """Return whether an optimizer has stepped since the last backward pass, as far as is known."""
        steps = [known.backwards_at_step for known in self._optimizers.values()]
        return not steps or self.backwards in (0, *steps)

    def trained(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that are trained."""
        return (parameter for model in self._models for parameter in model.parameters() if parameter.requires_grad)

    def add_model(self, model: nn.Module) -> Synchronizer:
        """Prepare a model; if it was prepared before, it gets another synchronizer. Collective.

        Raises:
            ConfigError: ranks disagree about the model or a setting.
        """
        synchronizer = self._synchronize(model)
        is_active = type(synchronizer) is not Synchronizer
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        number = next(self._numbers) if is_active else None
        self._models[model] = _Model(weakref.ref(synchronizer), number, frozen)
        self.has_models, self.has_frozen = True, self.has_frozen or (bool(frozen) and self._strategy.world.size > 1)
        if is_active:
            self.active.append(weakref.ref(synchronizer))
        if len(self.active) > 1:
            self._forget_models()
        for active in self.synchronizers:
            active.sends_early = len(self.active) == 1
        norms = (layer for layer in model.modules() if isinstance(layer, _BatchNorm))
        self._global_batch.follow(layer for layer in norms if not isinstance(layer, GlobalBatchNorm))
        return synchronizer

    def _forget_models(self) -> None:
        """Drop models that no rank holds. Collective, so that all ranks drop them at the same time."""
        gc.collect()
        alive = self._strategy.all_gather_object([held() is not None for held in self.active])
        self.active = [held for held, *ranks in zip(self.active, *alive, strict=True) if any(ranks)]

    def add_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Give an optimizer rank 0's state. Collective.

        Raises:
            ConfigError: ranks disagree about the optimizer.
        """
        horovods, kind = "Horovod's DistributedOptimizer", type(optimizer).__name__
        if (is_horovods := hasattr(optimizer, "skip_synchronize")) or kind == "ZeroRedundancyOptimizer":
            raise ConfigError(
                f"the optimizer is {horovods if is_horovods else kind}, which exchanges by itself what run.prepare "
                "has the job exchange; give it the optimizer that it was made from"
            )
        self.has_optimizers = True
        held = _ids(optimizer)
        self.check_known(held)
        known = PreparedOptimizer(next(self._numbers), len(optimizer.param_groups), self.backwards)
        self._optimizers[optimizer] = known
        self._adopt_loaded_settings(optimizer)
        check_consistency(self._strategy, describe_optimizer(optimizer))
        if optimizer.state:
            # Moves state that was loaded from a checkpoint to its parameters' device.
            optimizer.load_state_dict(optimizer.state_dict())
        self._strategy.adopt(optimizer)
        # Keep the models alive as long as their optimizer.
        optimizer.__dict__["_trainer_models"] = [
            model for model in self._models if held & set(map(id, model.parameters()))
        ]
        _end_earlier(optimizer)
        return known

    def _adopt_loaded_settings(self, optimizer: Optimizer) -> None:
        """Take rank 0's optimizer settings if it alone has loaded the optimizer from a file. Collective."""
        has_state, groups, settings = bool(optimizer.state), optimizer.param_groups, None
        if self._strategy.world.is_root and has_state:
            settings = [{name: value for name, value in group.items() if is_plain(value)} for group in groups]
        (_, loaded), *others = self._strategy.all_gather_object((has_state, settings))
        if loaded is not None and not all(has_state for has_state, _ in others):
            for group, values in zip(groups, loaded, strict=False):  # their number is compared next
                group.update(values)

    def connect(self) -> None:
        """Find the synchronizers of the models whose parameters each optimizer holds."""
        for optimizer, known in self._optimizers.items():
            held = _ids(optimizer)
            known.synchronizers = [
                each.synchronizer for model, each in self._models.items() if held & set(map(id, model.parameters()))
            ]

    def check_groups(self, known: PreparedOptimizer, optimizer: Optimizer) -> None:
        """Check the parameters of an optimizer to which a group was added since.

        Raises:
            ConfigError: a parameter belongs to no model, or its gradients are not all-reduced.
        """
        self.check_parameters((), [optimizer])
        self.check_known(_ids(optimizer))
        known.groups = len(optimizer.param_groups)
        self.connect()

    def check_known(self, held: set[int] | None = None) -> None:
        """Check that gradients of all trained parameters are all-reduced; with `held`, of parameters with these ids.

        Raises:
            ConfigError: a parameter was added, replaced or unfrozen since.
        """
        for model, synchronizer in self.models.items():
            if not isinstance(synchronizer, GradientSynchronizer):
                continue
            followed = set(map(id, synchronizer.parameters))
            trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
            if (trained if held is None else trained & held) - followed:
                raise ConfigError(
                    f"parameters of {type(model).__name__} were added, replaced or unfrozen after run.prepare, and "
                    "their gradients are not all-reduced; call run.prepare(model, optimizer) again afterwards"
                )

    def check_frozen(self) -> None:
        """Raise `TrainerError` if a parameter that was frozen in `prepare` no longer is."""
        frozen = (parameter for known in self._models.values() for parameter in known.frozen)
        if any(parameter.requires_grad for parameter in frozen):
            raise TrainerError(
                "parameters were unfrozen after run.prepare, and their gradients are not all-reduced; call "
                "run.prepare(model, optimizer) again afterwards"
            )

    def check_parameters(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Check that every parameter of the optimizers belongs to exactly one model, including the models to be added.

        Raises:
            ConfigError: an optimizer has a parameter that belongs to none of the models, or two models share one.
        """
        owners: dict[int, nn.Module] = {}
        for model in dict.fromkeys((*self._models, *models)):
            for parameter in model.parameters():
                if owners.setdefault(id(parameter), model) is not model:
                    raise ConfigError(
                        f"{type(model).__name__} and {type(owners[id(parameter)]).__name__} share parameters, and "
                        "each gradient is all-reduced once; prepare one model that contains both"
                    )
        for optimizer in optimizers:
            strangers = len(set(map(id, current(parameters_of(optimizer)))) - set(owners))
            if strangers:
                raise ConfigError(
                    f"the optimizer holds {strangers} parameters that the model does not have; their gradients would "
                    "not be all-reduced: make them part of a model, and prepare it first or in the same call; loose "
                    "ones, as learnable weights of losses are, go into an nn.ParameterList, which is a model"
                )

    def _synchronize(self, model: nn.Module) -> Synchronizer:
        """Compare a model and the settings over the ranks, then move it and have the strategy synchronize it."""
        strategy, config = self._strategy, self._config
        if config.fsdp != FsdpConfig() and not strategy.shards:
            raise ConfigError("fsdp is given, and the strategy is another one; take strategy 'fsdp', or leave fsdp out")
        check_devices(strategy)
        facts = {"PyTorch's version": torch.__version__, "the kind of device": strategy.world.device.type}
        check_consistency(strategy, {**describe_model(model), **facts, **describe_settings(config)})
        _end_earlier(model)
        if not strategy.shards:
            model.to(strategy.world.device)
        for layer in model.modules():
            if isinstance(layer, GlobalBatchNorm):  # of an earlier run, or loaded from a file
                layer.batch = self._global_batch
        if config.sync_batch_norm:
            convert_sync_batch_norm(model, self._global_batch)
        if config.compile and not strategy.shards:
            model.compile()
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        synchronizer = strategy.prepare(model, named, config)
        retire = weakref.WeakMethod(synchronizer.retire)
        at_end(model, lambda: (method := retire()) and method())
        return synchronizer


@dataclass(frozen=True)
class _Model:
    """A prepared model's synchronizer and number."""

    synchronizer: weakref.ref[Synchronizer]
    number: int | None
    """The model's number, the same on all ranks; None where there is nothing to synchronize."""
    frozen: list[nn.Parameter]


@dataclass
class PreparedOptimizer:
    """A prepared optimizer's number, groups and synchronizers."""

    number: int
    """The optimizer's number, the same on all ranks."""
    groups: int
    """The number of parameter groups when they were checked last."""
    backwards_at_step: int
    """The run's number of backward passes at the optimizer's last step."""
    synchronizers: Sequence[weakref.ref[Synchronizer]] = ()
    """The synchronizers of the optimizer's models, as far as they have something to do."""
    running_at: int | None = None
    """While a step runs, the run's number of backward passes at its beginning."""


def _ids(optimizer: Optimizer) -> set[int]:
    """Return the ids of the optimizer's parameters."""
    return set(map(id, parameters_of(optimizer)))

"""Prepared models and optimizers: checked, alike on all ranks, each model with what synchronizes its gradients."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet

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
from trainer.models.sync_batch_norm import convert_sync_batch_norm
from trainer.strategies.base import Strategy
from trainer.strategies.gradients import GradientSynchronizer, Synchronizer

_ENDS: WeakKeyDictionary[nn.Module | Optimizer, list[Callable[[], object]]] = WeakKeyDictionary()


def at_end(prepared: nn.Module | Optimizer, end: Callable[[], object]) -> None:
    """Have `end` called when this model or optimizer is prepared again, by the same run or by another."""
    _ENDS.setdefault(prepared, []).append(end)


def _end_earlier(prepared: nn.Module | Optimizer) -> None:
    """Have a model or an optimizer leave the run that has prepared it before."""
    for end in _ENDS.pop(prepared, ()):
        end()


class Prepared:
    """The prepared models and optimizers of one `Run`.

    They are held weakly: a sweep over many of them keeps none that nobody else holds. So are the synchronizers, which
    the hooks on a model's parameters own; one that has nothing to do is owned by nobody, and is made when asked for.
    """

    def __init__(self, strategy: Strategy, config: RunConfig) -> None:
        self._strategy, self._config = strategy, config
        self._models: WeakKeyDictionary[nn.Module, _Model] = WeakKeyDictionary()
        self._optimizers: WeakKeyDictionary[Optimizer, PreparedOptimizer] = WeakKeyDictionary()
        self._numbers = itertools.count()
        self.active: list[weakref.ref[Synchronizer]] = []
        """What synchronizes the prepared models, in their order. The places are the same on all ranks: a model that is
        gone on this one keeps its place until no rank holds it."""
        self.norms: WeakSet[_BatchNorm] = WeakSet()
        self.has_models = self.has_optimizers = False
        """Whether any was prepared so far."""
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
        """What synchronizes the models that somebody still holds, where there is something to synchronize."""
        return [synchronizer for held in self.active if (synchronizer := held()) is not None]

    @property
    def numbered_models(self) -> dict[int, nn.Module]:
        """The models that have something to synchronize, by numbers that are the same on all ranks."""
        return {known.number: model for model, known in self._models.items() if known.number is not None}

    def is_between_updates(self) -> bool:
        """Return whether an optimizer has stepped on what the last backward pass has left, as far as is known."""
        steps = [known.backwards_at_step for known in self._optimizers.values()]
        return not steps or self.backwards in (0, *steps)

    def trained(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that are trained."""
        return (parameter for model in self._models for parameter in model.parameters() if parameter.requires_grad)

    def add_model(self, model: nn.Module) -> Synchronizer:
        """Prepare a model; one that was prepared before gets another synchronizer. Collective.

        Raises:
            ConfigError: ranks disagree about the model or a setting.
        """
        synchronizer = self._synchronize(model)
        is_active = type(synchronizer) is not Synchronizer
        self._models[model] = _Model(
            synchronizer=weakref.ref(synchronizer),
            number=next(self._numbers) if is_active else None,
            frozen=[parameter for parameter in model.parameters() if not parameter.requires_grad],
        )
        self.has_models = True
        for known in self._optimizers.values():
            known.synchronizers = None
        if is_active:
            self.active.append(weakref.ref(synchronizer))
        if len(self.active) > 1:
            self._forget_models()
        for active in self.synchronizers:
            active.sends_early = len(self.active) == 1
        self.norms.update(layer for layer in model.modules() if isinstance(layer, _BatchNorm))
        return synchronizer

    def _forget_models(self) -> None:
        """Leave out models that no rank holds. Collective: what is all-reduced must not depend on who noticed when."""
        gc.collect()
        alive = self._strategy.all_gather_object([held() is not None for held in self.active])
        self.active = [held for held, *ranks in zip(self.active, *alive, strict=True) if any(ranks)]

    def add_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Give an optimizer rank 0's state. Collective.

        Raises:
            ConfigError: ranks disagree about the optimizer.
        """
        if hasattr(optimizer, "skip_synchronize"):
            raise ConfigError(
                "the optimizer is Horovod's DistributedOptimizer, which all-reduces gradients a second time; give "
                "run.prepare the optimizer that it was made from"
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
        # So that a model which nobody else holds, a list of two networks say, lives as long as what trains it.
        optimizer.__dict__["_trainer_models"] = [
            model for model in self._models if held & set(map(id, model.parameters()))
        ]
        _end_earlier(optimizer)
        return known

    def _adopt_loaded_settings(self, optimizer: Optimizer) -> None:
        """Give the groups rank 0's settings where it alone has loaded a file: its learning rate is not the script's."""
        has_state, groups, settings = bool(optimizer.state), optimizer.param_groups, None
        if self._strategy.world.is_root and has_state:
            settings = [{name: value for name, value in group.items() if is_plain(value)} for group in groups]
        (_, loaded), *others = self._strategy.all_gather_object((has_state, settings))
        if loaded is not None and not all(has_state for has_state, _ in others):
            for group, values in zip(groups, loaded, strict=False):  # their number is compared next
                group.update(values)

    def synchronizers_of(self, known: PreparedOptimizer, optimizer: Optimizer) -> list[Synchronizer]:
        """Return what synchronizes the models whose parameters the optimizer holds."""
        if not self.active:
            return []
        if known.synchronizers is None:
            held = _ids(optimizer)
            known.synchronizers = [
                weakref.ref(synchronizer)
                for model, synchronizer in self.models.items()
                if type(synchronizer) is not Synchronizer and held & set(map(id, model.parameters()))
            ]
        return [synchronizer for alive in known.synchronizers if (synchronizer := alive()) is not None]

    def check_groups(self, known: PreparedOptimizer, optimizer: Optimizer) -> None:
        """Check the parameters of an optimizer that has got another group since.

        Raises:
            ConfigError: one is of no model, or its gradients are not all-reduced.
        """
        if len(optimizer.param_groups) != known.groups:
            self.check_parameters((), [optimizer])
            self.check_known(_ids(optimizer))
            known.groups, known.synchronizers = len(optimizer.param_groups), None

    def check_known(self, held: set[int] | None = None) -> None:
        """Check that the gradients of all trained parameters are all-reduced; or of those whose ids are held.

        Raises:
            ConfigError: one was added, replaced or unfrozen since.
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
        if not self.active:
            return
        frozen = (parameter for known in self._models.values() for parameter in known.frozen)
        if any(parameter.requires_grad for parameter in frozen):
            raise TrainerError(
                "parameters were unfrozen after run.prepare, and their gradients are not all-reduced; call "
                "run.prepare(model, optimizer) again afterwards"
            )

    def check_parameters(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Check that every parameter of the optimizers is one of exactly one model's, of those to come included.

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
            current = {id(self._strategy.current(parameter)) for parameter in parameters_of(optimizer)}
            strangers = len(current - set(owners))
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
        if config.sync_batch_norm:
            convert_sync_batch_norm(model, strategy.sum_statistics)
        if config.compile and not strategy.shards:
            model.compile()
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        synchronizer = strategy.prepare(model, named, config)
        retire = weakref.WeakMethod(synchronizer.retire)
        at_end(model, lambda: (method := retire()) and method())
        return synchronizer


@dataclass(frozen=True)
class _Model:
    """What is known of a model that was prepared."""

    synchronizer: weakref.ref[Synchronizer]
    number: int | None
    """The model's number, the same on all ranks; None where there is nothing to synchronize."""
    frozen: list[nn.Parameter]


@dataclass
class PreparedOptimizer:
    """What is known of an optimizer that was prepared."""

    number: int
    """The optimizer's number, the same on all ranks."""
    groups: int
    """How many parameter groups it had when it was checked."""
    backwards_at_step: int
    """How many backward passes of the run came before its last step."""
    synchronizers: list[weakref.ref[Synchronizer]] | None = None
    """What synchronizes its models; None until they are asked for."""


def _ids(optimizer: Optimizer) -> set[int]:
    """Return the ids of the optimizer's parameters."""
    return set(map(id, parameters_of(optimizer)))

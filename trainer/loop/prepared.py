"""Prepared models and optimizers: checked, alike on all ranks, each model with what synchronizes its gradients."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainer.config import FsdpConfig, RunConfig
from trainer.errors import ConfigError, TrainerError
from trainer.loop.consistency import (
    check_consistency,
    check_devices,
    describe_model,
    describe_optimizer,
    describe_settings,
)
from trainer.models.sync_batch_norm import convert_sync_batch_norm
from trainer.strategies.base import Strategy
from trainer.strategies.gradients import GradientSynchronizer, Synchronizer

StepHook = Callable[[Optimizer, Any, Any], Any]

# A model or an optimizer that is prepared again, by another Run or Trainer, leaves the first one.
_SYNCHRONIZED: MutableMapping[nn.Module, weakref.WeakMethod[Callable[[], None]]] = WeakKeyDictionary()
_HOOKS: MutableMapping[Optimizer, Sequence[RemovableHandle]] = WeakKeyDictionary()


class Prepared:
    """The prepared models and optimizers of one `Run`.

    They are held weakly: a sweep over many of them keeps none that nobody else holds.
    """

    def __init__(self, strategy: Strategy, config: RunConfig) -> None:
        self._strategy, self._config = strategy, config
        self._models: WeakKeyDictionary[nn.Module, _Model] = WeakKeyDictionary()
        self._optimizers: WeakKeyDictionary[Optimizer, PreparedOptimizer] = WeakKeyDictionary()
        self._numbers = itertools.count()
        self.active: list[weakref.ref[Synchronizer]] = []
        """Of models that have something to synchronize, in the order of `prepare`; of the same ones on all ranks."""
        self.norms: WeakSet[_BatchNorm] = WeakSet()
        self.has_models = self.has_optimizers = False
        """Whether there ever was one."""
        self.backwards = 0
        """Backward passes so far."""

    @property
    def models(self) -> dict[nn.Module, Synchronizer]:
        """The models that somebody still holds, in the order of `prepare`."""
        held = [(model, known.synchronizer()) for model, known in self._models.items()]
        return {model: synchronizer or Synchronizer() for model, synchronizer in held}

    def count_models(self) -> int:
        """Return how many models somebody still holds."""
        return len(self._models)

    @property
    def optimizers(self) -> dict[Optimizer, PreparedOptimizer]:
        """Those that somebody still holds."""
        return dict(self._optimizers)

    @property
    def synchronizers(self) -> list[Synchronizer]:
        """Those of models that have something to synchronize, and that somebody still holds."""
        return [synchronizer for held in self.active if (synchronizer := held()) is not None]

    @property
    def numbered_models(self) -> dict[int, nn.Module]:
        """Those that have something to synchronize, by numbers that are the same on all ranks."""
        return {known.number: model for model, known in self._models.items() if known.number is not None}

    def trained(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that are trained."""
        return (parameter for model in self._models for parameter in model.parameters() if parameter.requires_grad)

    def add_model(self, model: nn.Module) -> Synchronizer:
        """Prepare a model; one that was prepared before gets another synchronizer. Collective.

        Raises:
            ConfigError: ranks disagree about the model or a setting.
        """
        synchronizer = _prepare_model(self._strategy, model, self._config)
        is_active = type(synchronizer) is not Synchronizer
        self._models[model] = _Model(
            synchronizer=weakref.ref(synchronizer) if is_active else lambda: synchronizer,
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
        self.has_optimizers = True
        held = parameters_of(optimizer)
        self.check_known(held)
        known = PreparedOptimizer(next(self._numbers), len(optimizer.param_groups), self.backwards)
        self._optimizers[optimizer] = known
        check_consistency(self._strategy, describe_optimizer(optimizer))
        if optimizer.state:
            # Moves state that was loaded from a checkpoint to its parameters' device.
            optimizer.load_state_dict(optimizer.state_dict())
        self._strategy.adopt(optimizer)
        # So that a model which nobody else holds, a list of two networks say, lives as long as what trains it.
        optimizer.__dict__["_trainer_models"] = [
            model for model in self._models if held & set(map(id, model.parameters()))
        ]
        return known

    def synchronizers_of(self, known: PreparedOptimizer, optimizer: Optimizer) -> list[Synchronizer]:
        """Return those of the models whose parameters the optimizer holds."""
        if not self.active:
            return []
        if known.synchronizers is None:
            held = parameters_of(optimizer)
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
            self.check_known(parameters_of(optimizer))
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
            held = {id(self._strategy.current(held)) for group in optimizer.param_groups for held in group["params"]}
            strangers = len(held - set(owners))
            if strangers:
                raise ConfigError(
                    f"the optimizer holds {strangers} parameters that the model does not have; their gradients would "
                    "not be all-reduced: make them part of a model, and prepare it first or in the same call; loose "
                    "ones, as learnable weights of losses are, go into an nn.ParameterList, which is a model"
                )


@dataclass(frozen=True)
class _Model:
    """What is known of a model that was prepared."""

    synchronizer: Callable[[], Synchronizer | None]
    number: int | None
    """The same on all ranks, which may hold other models; None where there is nothing to synchronize."""
    frozen: list[nn.Parameter]


@dataclass
class PreparedOptimizer:
    """What is known of an optimizer that was prepared."""

    number: int
    """The same on all ranks."""
    groups: int
    """Its parameter groups when it was checked."""
    backwards_at_step: int
    """Backward passes before its last step."""
    synchronizers: list[weakref.ref[Synchronizer]] | None = None
    """Those of its models; None until they are asked for."""


def _prepare_model(strategy: Strategy, model: nn.Module, config: RunConfig) -> Synchronizer:
    """Run the consistency checks, then move the model and have the strategy synchronize its gradients. Collective."""
    if config.fsdp != FsdpConfig() and not strategy.shards:
        raise ConfigError("fsdp is given, and the strategy is another one; take strategy 'fsdp', or leave fsdp out")
    check_devices(strategy)
    facts: dict[str, object] = {
        "PyTorch's version": torch.__version__,
        "the kind of device": strategy.world.device.type,
    }
    check_consistency(strategy, {**describe_model(model), **facts, **describe_settings(config)})
    earlier = _SYNCHRONIZED.pop(model, None)
    if earlier is not None and (retire := earlier()) is not None:
        retire()
    if not strategy.shards:
        model.to(strategy.world.device)
    if config.sync_batch_norm:
        convert_sync_batch_norm(model, strategy.sum_statistics)
    if config.compile and not strategy.shards:
        model.compile()
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    synchronizer = strategy.prepare(model, named, config)
    _SYNCHRONIZED[model] = weakref.WeakMethod(synchronizer.retire)
    return synchronizer


def parameters_of(optimizer: Optimizer) -> set[int]:
    """Return the ids of the optimizer's parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def hook_steps(optimizer: Optimizer, before: StepHook, after: StepHook) -> None:
    """Give an optimizer the hooks of its steps, which replace those of an earlier call."""
    for hook in _HOOKS.pop(optimizer, ()):
        hook.remove()
    _HOOKS[optimizer] = (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))

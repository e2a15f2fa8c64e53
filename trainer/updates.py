"""Updates: backward passes, and steps of optimizers on the mean gradients of all ranks."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from trainer.config import RunConfig
from trainer.consistency import PeriodicCheck
from trainer.data.base import Step
from trainer.errors import ConfigError, TrainerError
from trainer.launch.output import print_line
from trainer.launch.status import UpdateCounter
from trainer.loss_scaler import LossScaler, gradients_of
from trainer.preparation import check_parameters, parameters_of, prepare_optimizer
from trainer.profiling.step_timer import step_timer
from trainer.random_numbers import warn_of_twins
from trainer.strategies.base import Strategy, Synchronizer
from trainer.strategies.gradients import GradientSynchronizer
from trainer.sync_batch_norm import leave_out
from trainer.weighing import Weighing


class Updates:
    """The prepared models and optimizers of one `Run`, from a batch to the step that it ends in.

    A backward pass that closes an update returns when the gradients are the mean over all ranks. So an optimizer is not
    wrapped, and any other code may read and change the gradients, as in one process; a hook of the step is left for
    what combines steps, for the loss scale, and for checks.

    Models and optimizers are held weakly: a sweep over many of them keeps none that nobody else holds.
    """

    def __init__(self, strategy: Strategy, config: RunConfig) -> None:
        self._strategy, self._config = strategy, config
        self.scaler = LossScaler(strategy.world.device.type) if config.precision == "fp16" else None
        self.completed = UpdateCounter()
        self.weighing = Weighing(strategy, config.accumulate, self._on_step)
        self._models: weakref.WeakKeyDictionary[nn.Module, Callable[[], Synchronizer | None]] = (
            weakref.WeakKeyDictionary()
        )
        self._active: list[weakref.ref[Synchronizer]] = []
        """Of models that have something to synchronize, in the order of `prepare`; of the same ones on all ranks."""
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, _Optimizer] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakKeyDictionary[Synchronizer, set[int]] = weakref.WeakKeyDictionary()
        """By id, the optimizers that have stepped since the last all-reduce of a model's gradients."""
        self._stepping: set[int] = set()
        """The ids of optimizers within a step."""
        self._norms: weakref.WeakSet[_BatchNorm] = weakref.WeakSet()
        self._frozen: weakref.WeakKeyDictionary[nn.Module, list[nn.Parameter]] = weakref.WeakKeyDictionary()
        self._is_local = self._is_padding = self._is_in_pass = self._has_compared = self._had_no_sync = False
        self._has_warned = False
        self._counts = itertools.count()
        self._numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        """Of the models that have something to synchronize; the same on all ranks, which may hold others."""
        self._has_models = self._has_optimizers = False
        self._in_no_sync = self._backwards = 0
        self._periodic = PeriodicCheck(strategy)
        self._kept: Callable[[], nn.Parameter | None] = _none
        """A parameter that has a gradient since the update's first batch, unless zero_grad came."""

    @property
    def models(self) -> dict[nn.Module, Synchronizer]:
        """The models that somebody still holds, in the order of `prepare`."""
        held = [(model, held()) for model, held in self._models.items()]
        return {model: synchronizer or Synchronizer() for model, synchronizer in held}

    @property
    def optimizers(self) -> list[Optimizer]:
        return [*self._optimizers]

    @property
    def sync_gradients(self) -> bool:
        """Whether the batch that was drawn last ends an update."""
        return self.weighing.closes_update

    def has_trained(self) -> bool:
        """Return whether there was a backward pass."""
        return self._backwards > 0

    def add_model(self, model: nn.Module, forward: nn.Module, synchronizer: Synchronizer) -> None:
        """Count a model in; one that was prepared before gets another synchronizer. Collective.

        Args:
            forward: the module to call for it.
        """
        self._has_models, plain = True, type(synchronizer) is Synchronizer
        self._models[model] = (lambda: synchronizer) if plain else weakref.ref(synchronizer)
        for held in self._optimizers.values():
            held.synchronizers = None
        if not plain:
            self._numbers[model] = next(self._counts)
            self._active.append(weakref.ref(synchronizer))
            synchronizer.keep_local(self._is_local)
        if len(self._active) > 1:
            self._forget_models()
        for one in self._synchronizers():
            one.sends_early = len(self._active) == 1
        self._frozen.pop(model, None)
        if frozen := [parameter for parameter in model.parameters() if not parameter.requires_grad]:
            self._frozen[model] = frozen
        for layer in model.modules():
            if isinstance(layer, _BatchNorm):
                self._norms.add(layer)
        self.weighing.watch(forward)

    def _forget_models(self) -> None:
        """Leave out models that no rank holds. Collective: what is all-reduced must not depend on who noticed when."""
        gc.collect()
        alive = self._strategy.all_gather_object([held() is not None for held in self._active])
        self._active = [held for held, *ranks in zip(self._active, *alive, strict=True) if any(ranks)]

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Give the optimizer rank 0's state, and have its steps checked. Collective."""
        self._has_optimizers = True
        held = parameters_of(optimizer)
        for model, synchronizer in self.models.items():
            _check_known(model, synchronizer, held)
        own = self._optimizers[optimizer] = _Optimizer(self._backwards, len(optimizer.param_groups), next(self._counts))
        prepare_optimizer(self._strategy, optimizer, partial(self._before_step, own), partial(self._after_step, own))
        # So that a model which nobody else holds, a list of two networks say, lives as long as what trains it.
        optimizer.__dict__["_trainer_models"] = [
            model for model in self._models if held & set(map(id, model.parameters()))
        ]
        if timer := step_timer():
            timer.watch_optimizer(self._strategy, optimizer)

    def finish_step(self) -> None:
        """Complete what a step leaves for the next backward pass."""
        if self.scaler is not None:
            self.scaler.finish_step()

    def is_between_updates(self) -> bool:
        """Return whether an optimizer has stepped on what the last backward pass has left, as far as one tells."""
        return self._backwards in (0, *(one.backwards_at_step for one in self._optimizers.values())) or not len(
            self._optimizers
        )

    def on_batch(self, step: Step, source: int) -> None:
        """Note what a loader knows of the batch that it is about to yield.

        Args:
            source: number of the loader.
        """
        if self.sync_gradients or step.batch is None:  # another update begins, or the loop was left
            self._kept = _none
        self.completed.on_batch()
        self.weighing.on_batch(step, source)

    def _on_step(self, step: Step) -> None:
        """Prepare for a step's forward and backward pass."""
        self._keep_local()
        if self._is_padding is not (step.count == 0):
            self._is_padding = step.count == 0
            leave_out(self._norms, self._is_padding)

    def _keep_local(self) -> None:
        local = self._in_no_sync > 0 or not self.sync_gradients
        if local is not self._is_local:
            self._is_local = local
            for synchronizer in self._synchronizers():
                synchronizer.keep_local(local)

    def _synchronizers(self) -> list[Synchronizer]:
        return [synchronizer for held in self._active if (synchronizer := held()) is not None]

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
        self._check_backward()
        if self._is_in_pass:
            self._finish_failed_pass()
        self.weighing.before_pass(len(self._models))
        synchronizers = self._synchronizers()
        weight = self.weighing.weight_of_pass(samples, self._is_local, self._trained)
        for synchronizer in synchronizers:
            synchronizer.is_weightless = weight == 0.0
            synchronizer.before_backward()
        if self.scaler is not None:
            self.scaler.before_backward(self._optimizers)
        # A weight of exactly 1 is left out: the step is then that of a hand-written loop, to the last bit.
        weighted = loss if weight == 1.0 else loss * weight
        # 0 × NaN is NaN: a mean over nothing may be one, and has no gradient here.
        hooks = [one.register_hook(torch.zeros_like) for one in self._trained()] if weight == 0.0 else []
        self._is_in_pass = True
        try:
            (self.scaler.scale(weighted) if self.scaler else weighted).backward(**options)
        finally:
            self.weighing.after_pass()
            for hook in hooks:
                hook.remove()
        self._end_pass()
        if weight != 0.0:
            self._warn_of_others()
        if self.scaler is not None:
            self.scaler.after_backward()
        self._backwards += 1
        self._had_no_sync |= self._in_no_sync > 0
        if self._is_local:
            kept = next((one for one in self._trained() if one.grad is not None), None)
            self._kept = weakref.ref(kept) if kept is not None and not self.sync_gradients else _none
        else:
            if self._active:
                self._exchange([one for one in synchronizers if one.is_reached])
            self._after_exchange()

    def _end_pass(self) -> None:
        self._is_in_pass = False
        for synchronizer in self._synchronizers():
            synchronizer.after_backward()

    def _warn_of_others(self) -> None:
        """Say once that a pass has trained something else than the models that were prepared."""
        if self._has_warned or not self._active or not self._strategy.world.is_root:
            return
        # Others cannot tell.
        followed = [one for one in self._synchronizers() if isinstance(one, GradientSynchronizer)]
        if followed and not any(one.is_reached for one in followed):
            self._has_warned = True
            print_line(
                "trainer: WARNING: run.backward has reached no parameter of a model that was prepared. What it trains "
                "instead, a copy of such a model for example, each rank trains on its own batches: prepare that one",
                sys.stderr,
            )

    def _finish_failed_pass(self) -> None:
        """Do for a pass that has ended in an error what the other ranks, whose pass has not, wait for."""
        self._end_pass()
        if self._active and not self._is_local:
            self._exchange([one for one in self._synchronizers() if one.is_reached], failed=True)
            self._after_exchange()

    def _exchange(self, reached: Sequence[Synchronizer], *, failed: bool = False) -> None:
        """Make the gradients of the models that a pass has reached the mean over all ranks. Collective.

        Ranks may have reached different models, which they tell each other where there are several.

        Args:
            failed: whether the pass has ended in an error, so that this rank's gradients are of no use.
        """
        alive = [held() for held in self._active]
        wanted = alive
        if len(alive) > 1 and not self._strategy.shards:
            mask = torch.tensor([float(one in reached) for one in alive], device=self._strategy.world.device)
            counts = self._strategy.send_gradients(mask, f"reached.{len(alive)}").tolist()
            wanted = [one for one, count in zip(alive, counts, strict=True) if count > 0]
        for synchronizer in wanted:
            if synchronizer is not None:
                synchronizer.discard() if failed else synchronizer.complete()
                self._stepped[synchronizer] = set()

    def _after_exchange(self) -> None:
        if timer := step_timer():
            timer.mark_synchronized()
        if self.scaler is not None:
            self.scaler.unscale(self._optimizers)
        if not self._has_optimizers:
            self.completed.on_step(self.weighing.has_loader)
        if self._active and self._periodic.is_due():
            self._compare()
        self._had_no_sync = False

    def _compare(self) -> None:
        if not self._has_compared:
            warn_of_twins(self._strategy, self.weighing.first_inputs)
        self._has_compared = True
        for model, synchronizer in self.models.items():
            _check_known(model, synchronizer, set(map(id, model.parameters())))
        # Passes within no_sync may be of weights that are each rank's own for as long, as sharpness-aware steps have.
        equal = all(one.weights_are_equal for one in self._synchronizers()) and not self._had_no_sync
        optimizers = {own.number: optimizer for optimizer, own in self._optimizers.items()}
        models = dict(zip(self._numbers.values(), self._numbers, strict=True))
        self._periodic.compare(
            self.weighing.position, optimizers, models if equal and not self._strategy.shards else {}
        )

    def _trained(self) -> Iterator[nn.Parameter]:
        return (one for model in self._models for one in model.parameters() if one.requires_grad)

    def _check_backward(self) -> None:
        self._stepping.clear()  # what an error in a step has left
        if not self._has_models:
            raise TrainerError(
                "run.backward came before run.prepare: the ranks would train models of their own; call "
                "model, optimizer = run.prepare(model, optimizer) first"
            )
        if self.scaler is not None and not len(self._optimizers):
            raise TrainerError(
                "precision is 'fp16', whose loss scale leaves out steps with gradients that overflow, and no optimizer "
                "was prepared: call run.prepare(model, optimizer), or keep torch.amp.GradScaler under precision 'fp32'"
            )
        kept, self._kept = self._kept(), _none
        if kept is not None and kept.grad is None:
            raise TrainerError(
                "the gradients of this update's earlier batches are gone, and accumulate is "
                f"{self._config.accumulate}; call zero_grad only after a step, where run.sync_gradients is true"
            )
        if self._active and any(one.requires_grad for frozen in self._frozen.values() for one in frozen):
            raise TrainerError(
                "parameters were unfrozen after run.prepare, and their gradients are not all-reduced; call "
                "run.prepare(model, optimizer) again afterwards"
            )

    def synchronize(self, optimizers: Sequence[Optimizer] | None) -> None:
        """See `Run.synchronize`."""
        if self._config.reduction == "adasum":
            raise ConfigError(
                "reduction is 'adasum', which combines finished steps: there are no mean gradients to read"
            )
        for optimizer in self.optimizers if optimizers is None else optimizers:
            if optimizer not in self._optimizers:
                raise ConfigError(f"this {type(optimizer).__name__} was not prepared; call run.prepare with it first")
        if any(one.has_local_gradients for one in self._synchronizers()):
            self._exchange([one for one in self._synchronizers() if one.has_local_gradients])
            self._after_exchange()

    def _before_step(
        self, own: _Optimizer, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Check a step, and prepare what combines it with the other ranks'. A hook of the optimizer."""
        if id(optimizer) in self._stepping:  # the step of a class that calls its parent's
            return None
        self._stepping.add(id(optimizer))
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._complete(own, optimizer)
            for synchronizer in self._synchronizers_of(own, optimizer):
                synchronizer.before_step()
            if self.scaler is not None:
                self.scaler.before_step(optimizer)
            return None
        if self.scaler is not None or self._config.reduction == "adasum" or self._config.shared_mechanism:
            raise ConfigError("a closure goes with neither fp16, adasum, powersgd, sync_every nor outer_lr")
        averaging = self._averaging(own, optimizer, closure)
        if len(args) > 1:
            return (args[0], averaging, *args[2:]), kwargs
        return args, {**kwargs, "closure": averaging}

    def _averaging(self, own: _Optimizer, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that returns the mean loss over all ranks, on which the optimizer's decisions depend."""

        def average() -> Any:
            loss = closure()
            self._complete(own, optimizer)
            self._stepping.add(id(optimizer))  # still within the step
            if loss is None:
                return None
            world, weight = self._strategy.world, self.weighing.weight
            mean = torch.as_tensor(loss, device=world.device).detach().double()
            mean = mean * weight if weight else torch.zeros_like(mean)
            return (self._strategy.all_reduce(mean) / world.size).to(getattr(loss, "dtype", torch.float64))

        return average

    def _complete(self, own: _Optimizer, optimizer: Optimizer) -> None:
        """Check that a step has complete gradients, and all-reduce what was left on this rank."""
        if len(optimizer.param_groups) != own.groups:
            check_parameters(self._strategy, [*self._models], [optimizer])
            for model, synchronizer in self.models.items():
                _check_known(model, synchronizer, parameters_of(optimizer))
            own.groups, own.synchronizers = len(optimizer.param_groups), None
        is_repeated = self._backwards == own.backwards_at_step
        if is_repeated or not self.sync_gradients:
            self._check_step(optimizer)
        own.backwards_at_step = self._backwards
        synchronizers = self._synchronizers_of(own, optimizer)
        if not synchronizers:
            return
        # This rank has kept its gradients, or takes no part in a pass of others, who step on the same models.
        missed = [
            one
            for one in synchronizers
            if is_repeated and ((stepped := self._stepped.get(one)) is None or id(optimizer) in stepped)
        ]
        if missed or any(one.has_local_gradients for one in synchronizers):
            self._exchange([one for one in synchronizers if one in missed or one.has_local_gradients])
            self._after_exchange()
        for one in synchronizers:
            self._stepped.setdefault(one, set()).add(id(optimizer))

    def _check_step(self, optimizer: Optimizer) -> None:
        if not self.sync_gradients:
            raise TrainerError(
                f"optimizer.step() came before the update's {self._config.accumulate} batches were complete; step only "
                "where run.sync_gradients is true"
            )
        if gradients_of(optimizer):
            raise TrainerError(
                "optimizer.step() found gradients, but run.backward has not run since its last step; call "
                "run.backward(loss) before each step, and zero the gradients after it"
            )

    def _after_step(
        self, own: _Optimizer, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._stepping.discard(id(optimizer))
        self.completed.on_step(self.weighing.has_loader)
        for synchronizer in self._synchronizers_of(own, optimizer):
            synchronizer.after_step()
        if self.scaler is not None:
            self.scaler.after_step(optimizer)

    def _synchronizers_of(self, own: _Optimizer, optimizer: Optimizer) -> Sequence[Synchronizer]:
        """Return those of the models whose parameters the optimizer holds."""
        if not self._active:
            return ()
        if own.synchronizers is None:
            held = parameters_of(optimizer)
            own.synchronizers = [
                weakref.ref(synchronizer)
                for model, synchronizer in self.models.items()
                if type(synchronizer) is not Synchronizer and held & set(map(id, model.parameters()))
            ]
        return [synchronizer for held_one in own.synchronizers if (synchronizer := held_one()) is not None]


def _check_known(model: nn.Module, synchronizer: Synchronizer, held: set[int]) -> None:
    """Check that the gradients of a model's parameters, of those whose ids are held, are all-reduced."""
    if not isinstance(synchronizer, GradientSynchronizer):
        return
    known = set(map(id, synchronizer.parameters))
    if any(one.requires_grad and id(one) in held and id(one) not in known for one in model.parameters()):
        raise ConfigError(
            f"parameters of {type(model).__name__} were added, replaced or unfrozen after run.prepare, and their "
            "gradients are not all-reduced; call run.prepare(model, optimizer) again afterwards"
        )


class _Optimizer:
    """What is known of a prepared optimizer."""

    def __init__(self, backwards: int, groups: int, number: int) -> None:
        self.number = number
        """The same on all ranks."""
        self.backwards_at_step = backwards
        """Backward passes before its last step."""
        self.groups = groups
        """Its parameter groups when it was checked."""
        self.synchronizers: list[weakref.ref[Synchronizer]] | None = None
        """Those of its models; None until they are asked for."""


def _none() -> None:
    return None

"""Updates: backward passes, and steps of optimizers on the mean gradients of all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from trainer.preparation import parameters_of, prepare_optimizer
from trainer.profiling.step_timer import step_timer
from trainer.strategies.base import Strategy, Synchronizer
from trainer.sync_batch_norm import leave_out


class Updates:
    """The prepared models and optimizers of one `Run`, from a batch to the step that it ends in.

    An optimizer is not wrapped: a hook before its step waits for the gradients. So its class, its state and its
    schedulers stay the user's.
    """

    def __init__(self, strategy: Strategy, config: RunConfig) -> None:
        self.models: dict[nn.Module, Synchronizer] = {}
        self.sync_gradients = True
        """Whether the batch that was drawn last ends an update."""
        self._strategy, self._config = strategy, config
        # Those that have something to do, for all and for each optimizer: a single rank's steps cost nothing.
        self._active: list[Synchronizer] = []
        self._synchronizers: dict[Optimizer, list[Synchronizer]] = {}
        self._stepped: dict[Synchronizer, set[Optimizer]] = {}
        self._norms: set[_BatchNorm] = set()
        self.scaler = LossScaler(strategy.world.device.type) if config.precision == "fp16" else None
        self._weight, self._is_local, self._is_padding = 1.0, False, False
        self._backwards, self.completed = 0, UpdateCounter()
        self._backwards_at_step: dict[Optimizer, int] = {}
        self._groups: dict[Optimizer, int] = {}
        self._frozen: dict[nn.Module, list[nn.Parameter]] = {}
        self._stepping = set[Optimizer]()
        self.is_in_backward, self._has_loader, self._epoch = False, False, 0
        self._periodic = PeriodicCheck(strategy)
        self.samples = 0
        """Samples in the training batch that was drawn last; 0 for a padding batch."""
        self._kept: nn.Parameter | None = None  # has a gradient since the update's first batch, unless zero_grad came

    @property
    def optimizers(self) -> list[Optimizer]:
        return [*self._synchronizers]

    def has_trained(self) -> bool:
        """Return whether there was a backward pass."""
        return self._backwards > 0

    def add_model(self, model: nn.Module, synchronizer: Synchronizer) -> None:
        """Count a model in; one that was prepared before gets another synchronizer."""
        earlier = self.models.get(model)
        self.models[model] = synchronizer
        if earlier in self._active:
            self._active.remove(earlier)
            del self._stepped[earlier]
            for held in self._synchronizers.values():
                held[:] = [synchronizer if one is earlier else one for one in held]
        if type(synchronizer) is not Synchronizer:
            self._active.append(synchronizer)
            self._stepped[synchronizer] = set()
        self._frozen.pop(model, None)
        if frozen := [parameter for parameter in model.parameters() if not parameter.requires_grad]:
            self._frozen[model] = frozen
        self._norms |= {layer for layer in model.modules() if isinstance(layer, _BatchNorm)}

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Give the optimizer rank 0's state, and have its steps wait for the gradients of all ranks. Collective."""
        prepare_optimizer(self._strategy, optimizer, self._before_step, self._after_step)
        held = parameters_of(optimizer)
        self._synchronizers[optimizer] = [
            one for model, one in self.models.items() if one in self._active and held & set(map(id, model.parameters()))
        ]
        self._backwards_at_step[optimizer] = self._backwards
        self._groups[optimizer] = len(optimizer.param_groups)
        if timer := step_timer():
            timer.watch_optimizer(self._strategy, optimizer)

    def finish_step(self) -> None:
        """Complete what a step leaves for the next backward pass."""
        if self.scaler is not None:
            self.scaler.update(self._synchronizers)

    def is_between_updates(self) -> bool:
        """Return whether an optimizer has stepped on what the last backward pass has left."""
        return self._backwards in (0, *self._backwards_at_step.values())

    def on_batch(self, step: Step) -> None:
        """Note what the loader knows of the batch that it is about to yield."""
        self._weight, self.samples = step.weight, step.count
        self.completed.on_batch()
        if step.batch is not None:
            self._has_loader, self._epoch = True, step.epoch
        if self.sync_gradients or step.batch is None:  # another update begins, or the loop was left
            self._kept = None
        if step.closes_update is not self.sync_gradients:
            self.sync_gradients = step.closes_update
            self._keep_local(not step.closes_update)
        if self._is_padding is not (step.count == 0):
            self._is_padding = step.count == 0
            leave_out(self._norms, self._is_padding)

    def _keep_local(self, local: bool) -> None:
        self._is_local = local
        for synchronizer in self._active:
            synchronizer.keep_local(local)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Run.no_sync`."""
        before = self._is_local
        self._keep_local(True)
        try:
            yield
        finally:
            self._keep_local(before)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """See `Run.backward`."""
        if self._stepping or self._frozen or not self._has_loader or self._kept is not None or not self.models:
            self._check_backward()
        for synchronizer in self._active:
            synchronizer.is_weightless = self._weight == 0.0
            synchronizer.before_backward()
            self._stepped[synchronizer].clear()
        if self.scaler is not None:
            self.scaler.update(self._synchronizers)
        # A weight of exactly 1 is left out: the step is then that of a hand-written loop, to the last bit.
        weighted = loss if self._weight == 1.0 else loss * self._weight
        # 0 × NaN is NaN: a mean over nothing may be one, and has no gradient here.
        hooks = [one.register_hook(torch.zeros_like) for one in self._trained()] if self._weight == 0.0 else []
        self.is_in_backward = True
        try:
            (self.scaler.scale(weighted) if self.scaler else weighted).backward(retain_graph=retain_graph)
        finally:
            self.is_in_backward = False
            for hook in hooks:
                hook.remove()
        for synchronizer in self._active:
            synchronizer.after_backward()
        self._backwards += 1
        if not self.sync_gradients:
            self._kept = next((one for one in self._trained() if one.grad is not None), None)

    def _trained(self) -> Iterator[nn.Parameter]:
        return (one for model in self.models for one in model.parameters() if one.requires_grad)

    def _check_backward(self) -> None:
        self._stepping.clear()  # what an error in a step has left
        if not self.models:
            raise TrainerError(
                "run.backward came before run.prepare: the ranks would train models of their own; call "
                "model, optimizer = run.prepare(model, optimizer) first"
            )
        kept, self._kept = self._kept, None
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
        if not self._has_loader:
            self._check_loader()

    def _check_loader(self) -> None:
        if self._config.accumulate > 1:
            raise TrainerError(
                f"accumulate is {self._config.accumulate}, and only a loader of run.loader knows which batches end an "
                "update; use one, or accumulate in your loop"
            )
        if self._strategy.world.size > 1 and self._strategy.world.is_root and self._backwards == 0:
            print_line(
                "trainer: WARNING: run.backward without a batch of run.loader: each rank draws batches of its own, and "
                "they count the same in the mean",
                sys.stderr,
            )

    def synchronize(self, optimizers: Sequence[Optimizer] | None) -> None:
        """See `Run.synchronize`."""
        if self._config.reduction == "adasum":
            raise ConfigError(
                "reduction is 'adasum', which combines finished steps: there are no mean gradients to read"
            )
        for optimizer in self._synchronizers if optimizers is None else optimizers:
            if optimizer not in self._synchronizers:
                raise ConfigError(f"this {type(optimizer).__name__} was not prepared; call run.prepare with it first")
            for synchronizer in self._synchronizers[optimizer]:
                synchronizer.finish()
            if self.scaler is not None:
                self.scaler.unscale(optimizer)

    def clip_grad_norm_(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """See `Run.clip_grad_norm_`."""
        wanted = {id(parameter) for parameter in parameters}
        self.synchronize([one for one in self._synchronizers if wanted & parameters_of(one)])
        if timer := step_timer():
            timer.mark_synchronized()
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def _before_step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Complete the gradients before a step; with a closure, after each of its calls. A hook of the optimizer."""
        if optimizer in self._stepping:  # the step of a class that calls its parent's
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._complete(optimizer)
            for synchronizer in self._synchronizers[optimizer]:
                synchronizer.before_step()
            if self.scaler is not None:
                self.scaler.before_step(optimizer)
            self._stepping.add(optimizer)
            return None
        if self.scaler is not None or self._config.reduction == "adasum" or self._config.shared_mechanism:
            raise ConfigError("a closure goes with neither fp16, adasum, powersgd, sync_every nor outer_lr")
        for synchronizer in self._synchronizers[optimizer]:
            synchronizer.before_backward()  # an earlier pass may be on its way
        self._stepping.add(optimizer)
        completing = self._completing(optimizer, closure)
        if len(args) > 1:
            return (args[0], completing, *args[2:]), kwargs
        return args, {**kwargs, "closure": completing}

    def _completing(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that leaves the mean gradients, and returns the mean loss, over all ranks."""

        def complete() -> Any:
            loss = closure()
            self._complete(optimizer)
            self._stepping.add(optimizer)  # still within the step
            if loss is None:
                return None
            world = self._strategy.world
            mean = torch.as_tensor(loss, device=world.device).detach().double()
            mean = mean * self._weight if self._weight else torch.zeros_like(mean)
            return (self._strategy.all_reduce(mean) / world.size).to(getattr(loss, "dtype", torch.float64))

        return complete

    def _complete(self, optimizer: Optimizer) -> None:
        if len(optimizer.param_groups) != self._groups[optimizer]:
            raise TrainerError(
                "parameters were added to the optimizer after run.prepare, and their gradients are not all-reduced; "
                "call run.prepare(model, optimizer) again afterwards"
            )
        if self._backwards == self._backwards_at_step[optimizer] or not self.sync_gradients:
            self._check_step(optimizer)
        for synchronizer in self._synchronizers[optimizer]:
            # Several optimizers may share the gradients of one all-reduce; the same one steps on another.
            stepped = self._stepped[synchronizer]
            if optimizer in stepped:
                synchronizer.reopen()
                stepped.clear()
            synchronizer.finish()
            stepped.add(optimizer)
        if self._synchronizers[optimizer]:  # here, as a rank may have taken other backward passes, or none
            self._periodic.compare_when_due(self._synchronizers, self._epoch)
        self._backwards_at_step[optimizer] = self._backwards
        if self.scaler is not None:
            self.scaler.unscale(optimizer)

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

    def _after_step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._stepping.discard(optimizer)
        self.completed.on_step(self._has_loader)
        for synchronizer in self._synchronizers[optimizer]:
            synchronizer.after_step()
        if self.scaler is not None:
            self.scaler.after_step(optimizer)

"""The updates of a run: backward passes weighed by their batches, the all-reduce of gradients, the optimizers' steps.

Each rank's loss is the mean over its batch. With the batch's number of samples as the weight, the mean over ranks
is the mean over all their samples, also if the batches are uneven. A loader passes the weight along with each batch;
without a loader, the script gives the number of samples.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite
from operator import call
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.cluster.output import print_line
from trainer.config import RunConfig
from trainer.data.batches import Step
from trainer.errors import ConfigError, TrainerError
from trainer.loop.batches import Batches
from trainer.loop.consistency import PeriodicCheck
from trainer.loop.grad_scaler import check_step_is_scaled
from trainer.loop.gradients import Marks, has_changed, mark, parameters_of
from trainer.loop.prepared import Prepared, PreparedOptimizer, at_end
from trainer.loop.random_numbers import warn_of_twins
from trainer.strategies.base import Strategy
from trainer.strategies.gradients import Synchronizer
from trainer.watch.heartbeat import GRADIENTS, report_phase, report_step, waits
from trainer.watch.spans import EXCHANGE, in_span

_UNREACHED = (
    "trainer: WARNING: run.backward has reached no parameter of a model that was prepared. Each rank trains what it "
    "reaches instead, a copy of such a model say, on its own batches alone: prepare that"
)

_NOT_FINITE = (
    "trainer: WARNING: the loss of {} was the first that was not finite, in update {}, and no rank's has been finite "
    "since. Look at its batch there, or if all ranks are named at the gradients of the update before; run.all_reduce "
    "tells all ranks to skip such a batch (docs/own-loop.md)"
)


class Updates:
    """The updates of a `Run`: weigh a pass, run it, all-reduce its gradients, follow the optimizers' steps.

    Once `backward` has returned, no gradient is being all-reduced: until the step, any code may read and change the
    gradients, as in a single process. So an optimizer is not wrapped. Hooks on its step serve only mechanisms that
    combine weights, and checks.

    Args:
        prepared: the models and optimizers.
        batches: know which batch a pass belongs to.
    """

    def __init__(self, strategy: Strategy, config: RunConfig, prepared: Prepared, batches: Batches) -> None:
        self._strategy, self._config, self._prepared, self._batches = strategy, config, prepared, batches
        self._periodic = PeriodicCheck(strategy)
        self.completed = 0
        """Completed updates. A run that goes on from a checkpoint sets it to the checkpoint's."""
        self._counted_draws = 0
        self._weight = 1.0
        """The weight of the last backward pass: the factor on its loss."""
        self._is_local = False
        """Whether a later pass of the same update will send the last pass's gradients."""
        self._is_unfinished = False
        """Whether a backward pass runs, or has ended in an error."""
        self._had_no_sync = self._has_warned = self._has_told = self._has_twins = False
        self._checks_scale = config.precision == "fp16"
        self._in_no_sync = 0
        self._passes = 0
        """Backward passes without a loader."""
        self._kept: tuple[int, weakref.ref[nn.Parameter]] | None = None
        """An update's number, and a parameter with a gradient from its earlier batches. If that is gone, zero_grad came
        too early."""
        self._samples = 0.0
        """This rank's samples in the earlier passes of the current update, as the script gives them."""
        self._before: Marks | None = None
        """The gradients before the first of the passes with samples; None during that first pass."""
        self._losses: list[tuple[int, Tensor]] = []
        """This rank's losses since a finite one was last seen, each with the number of its all-reduce, from 1."""
        self._exchanges = 0
        """All-reduces of gradients, of whichever models, after which `PeriodicCheck` may compare the ranks."""

    def prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> dict[nn.Module, nn.Module]:
        """Prepare models and optimizers; return the module to call for each model. Collective.

        Raises:
            ConfigError: see `Prepared`.
        """
        self._prepared.check_parameters(models, optimizers)
        callable_models = {}
        for model in models:
            self._prepared.add_model(model)
            callable_models[model] = self._strategy.wrap(model)
            self._batches.watch(callable_models[model])
        for optimizer in optimizers:
            known = self._prepared.add_optimizer(optimizer)
            # `known` is handed to each step: a lookup in a weak dictionary takes as long as all the checks of a step.
            at_end(optimizer, optimizer.register_step_pre_hook(partial(self._before_step, known)).remove)
            at_end(optimizer, optimizer.register_step_post_hook(partial(self._after_step, known)).remove)
        self._prepared.connect()
        return callable_models

    # A backward pass.

    def backward(self, loss: Tensor, samples: float | None, is_sum: bool, *options: Any) -> None:
        """See `Run.backward`.

        Args:
            options: the arguments of `torch.Tensor.backward`.
        """
        prepared, batches = self._prepared, self._batches
        synchronizers = prepared.synchronizers if prepared.active else []
        if not prepared.backwards or prepared.has_frozen or self._kept is not None or self._is_unfinished:
            self._check_pass(synchronizers)
        if not batches.has_loader and self._config.accumulate > 1:
            self._count_pass()
        self._is_local = is_local = self._in_no_sync > 0 or not batches.current.closes_update
        step = batches.step_of_pass(is_weighed=samples is not None or is_sum)
        weight = step.weight if samples is None and not is_sum else self._weigh(step, samples)
        self._weight = weight
        for synchronizer in synchronizers:
            synchronizer.before_backward(is_local=is_local, is_weightless=weight == 0.0)
        self._is_unfinished = batches.is_in_pass = True
        try:
            if weight:
                # A weight of exactly 1 is left out: the step is then that of a hand-written loop, to the last bit.
                (loss if weight == 1.0 else loss * weight).backward(*options)
            else:
                self._run_weightless(loss, *options)
        finally:
            batches.is_in_pass = False
        self._is_unfinished = False
        prepared.backwards += 1
        reached = self._note_reached(synchronizers, loss) if synchronizers else []
        if is_local:
            self._keep()
        elif prepared.active or not prepared.has_optimizers:
            self._all_reduce(reached)

    def _note_reached(self, synchronizers: Sequence[Synchronizer], loss: Tensor) -> list[Synchronizer]:
        """Note the loss of a pass that has ended; return the synchronizers of the models that it has reached."""
        if self._weight and not self._has_told and self._strategy.world.size > 1:
            self._losses.append((self._exchanges + 1, _number(loss)))
        for synchronizer in synchronizers:
            synchronizer.after_backward()
        reached = [synchronizer for synchronizer in synchronizers if synchronizer.is_reached]
        if self._weight and not reached and not self._has_warned:
            self._has_warned = True
            if self._strategy.world.is_root:
                print_line(_UNREACHED, sys.stderr)
        return reached

    def _keep(self) -> None:
        """Note that gradients stay on this rank until a later pass of the same update sends them."""
        self._had_no_sync |= self._in_no_sync > 0
        if not self._batches.current.closes_update:
            kept = next((parameter for parameter in self._prepared.trained() if parameter.grad is not None), None)
            self._kept = (self._batches.update, weakref.ref(kept)) if kept is not None else None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Run.no_sync`."""
        self._in_no_sync += 1
        try:
            yield
        finally:
            self._in_no_sync -= 1

    def synchronize(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """See `Run.synchronize`."""
        for optimizer in optimizers:
            if optimizer not in self._prepared.optimizers:
                raise ConfigError(f"this {type(optimizer).__name__} was not prepared; call run.prepare with it first")
        if kept := [each for each in self._prepared.synchronizers if each.has_local_gradients]:
            self._all_reduce(kept)

    def _tell_of_not_finite(self) -> None:
        """Warn once of the rank whose loss was the first that was not finite, if no rank's is since. Collective."""
        if self._has_told:
            return
        values = torch.stack([loss for _, loss in self._losses]).tolist() if self._losses else [0.0]
        if isfinite(values[-1]):
            self._losses = []
        # Where a step was skipped, as GradScaler does, another rank's last loss is finite.
        first = next((n for (n, _), value in zip(self._losses, values, strict=False) if not isfinite(value)), 0)
        by_rank = self._strategy.all_gather_object((first, self._strategy.world.host))
        self._has_told = all(number for number, _ in by_rank)
        if self._has_told and self._strategy.world.is_root:
            (first, _), ranks = min(by_rank), enumerate(by_rank)
            who = ", ".join(f"rank {rank} on host {host}" for rank, (number, host) in ranks if number == first)
            print_line(_NOT_FINITE.format(who, first), sys.stderr)

    def _check_pass(self, synchronizers: Sequence[Synchronizer]) -> None:
        """Run the checks of a first pass, and of one with frozen parameters or after one that was local or failed."""
        prepared = self._prepared
        if not prepared.has_models:
            raise TrainerError(
                "run.backward came before run.prepare: each rank would train a model of its own; call "
                "model, optimizer = run.prepare(model, optimizer) first"
            )
        if self._checks_scale and not prepared.optimizers:
            raise TrainerError(
                "precision is 'fp16', and no optimizer was prepared, so nothing tells whether a GradScaler takes its "
                "steps; call run.prepare(model, optimizer), or write torch.autocast yourself under precision 'fp32'"
            )
        if self._kept is not None:
            (update, held), self._kept = self._kept, None
            if update == self._batches.update and (kept := held()) is not None and kept.grad is None:
                raise TrainerError(
                    "the gradients of this update's earlier batches are gone, and accumulate is "
                    f"{self._config.accumulate}; call zero_grad only after a step, where run.sync_gradients is true: "
                    "also after the last batch of an epoch, which closes an update"
                )
        if prepared.has_frozen:
            prepared.check_frozen()
        if self._is_unfinished:
            self._is_unfinished = False
            for synchronizer in synchronizers:
                synchronizer.after_backward()
            if prepared.active and not self._is_local:  # the other ranks wait in the all-reduce of the failed pass
                self._all_reduce([each for each in synchronizers if each.is_reached], failed=True)

    def _run_weightless(self, loss: Tensor, *options: Any) -> None:
        """Run a pass that counts for nothing.

        The mean over an empty batch may be NaN, and 0 × NaN is NaN. These hooks make its gradients zeros, and so do
        those of statistics that all ranks sum up.
        """
        hooks = [each.register_hook(torch.zeros_like) for each in self._prepared.trained()]
        self._batches.global_batch.is_weighed = False
        try:
            (loss * 0.0).backward(*options)
        finally:
            self._batches.global_batch.is_weighed = True
            for hook in hooks:
                hook.remove()

    # The weight of a pass.

    def _weigh(self, step: Step, samples: float | None) -> float:
        """Return the weight of a backward pass that the script weighs itself. Collective if `samples` is given.

        Args:
            samples: how many samples this rank's loss is a mean over; None for a loss that is a sum over them, which
                counts as often as there are ranks, in a mean over these.

        Raises:
            ConfigError: `samples` is not a number that is at least 0.
        """
        world = self._strategy.world
        if samples is None:
            return float(world.size) if step.count else 0.0
        samples = samples if step.count else 0.0
        if not 0 <= samples < float("inf"):
            raise ConfigError(f"samples is {samples!r}; it must be a number that is at least 0")
        self._samples += samples
        # The gradients of the earlier passes are sums over samples: only the last pass knows by what to divide them.
        if self._is_local:
            if self._before is None:
                self._before = mark(self._prepared.trained())
            return samples
        samples_here = torch.tensor(self._samples, dtype=torch.float64, device=world.device)
        total = float(self._strategy.all_reduce(samples_here)) if world.size > 1 else self._samples
        per_sample = world.size / total if total else 0.0
        if self._before is not None:
            self._scale_earlier_passes(per_sample, self._before)
        self._samples, self._before = 0.0, None
        return samples * per_sample

    def _count_pass(self) -> None:
        """Count a pass without a loader: every `accumulate` passes form an update.

        Raises:
            TrainerError: several models were prepared, so that it is unclear which passes form an update.
        """
        accumulate = self._config.accumulate
        if (models := len(self._prepared.models)) > 1:
            raise TrainerError(
                f"accumulate is {accumulate}, and there are {models} models and no batch of run.loader, so "
                "it is unclear which backward passes form an update; use run.no_sync and run.backward's samples"
            )
        self._passes += 1
        self._batches.activate(Step(None, 1, 1 / accumulate, closes_update=self._passes % accumulate == 0))

    def _scale_earlier_passes(self, factor: float, before: Marks) -> None:
        for parameter in self._prepared.trained():
            gradient = parameter.grad
            if gradient is None or not has_changed(parameter, before):
                continue  # no pass of this update has reached it
            if parameter in before and before[parameter][0] is gradient:
                raise TrainerError(
                    "an update of several passes with samples was begun on gradients of an earlier one; call zero_grad "
                    "before its first pass"
                )
            gradient.detach().mul_(factor)

    # The all-reduce of gradients.

    def _all_reduce(self, wanted: Collection[Synchronizer], *, failed: bool = False) -> None:
        """All-reduce the gradients of the models that a pass has reached. Collective.

        Ranks may have reached different models. If there are several, they first agree on those that any rank reached.

        Args:
            wanted: the synchronizers of the models that were reached on this rank.
            failed: whether the pass raised an error on this rank; its gradients are then left out.
        """
        prepared = self._prepared
        agrees = len(prepared.active) > 1 and not self._strategy.shards
        for synchronizer in self._reached_by_any(wanted) if agrees else prepared.synchronizers:
            with waits(GRADIENTS):
                in_span(EXCHANGE, synchronizer.reduce_after_error if failed else synchronizer.complete)
            synchronizer.has_local_gradients, synchronizer.stepped = False, set()
        if not prepared.has_optimizers:
            self._count_step()
        self._exchanges += 1
        if self._exchanges > self._periodic.due_after and prepared.active:
            self._compare()
        self._had_no_sync = False

    def _reached_by_any(self, wanted: Collection[Synchronizer]) -> list[Synchronizer]:
        """Return the synchronizers of the models that any rank has reached, as far as this rank holds them."""
        # `active` has the same order on every rank; a model that this rank no longer holds is None here.
        synchronizers = [held() for held in self._prepared.active]
        is_wanted = [float(synchronizer in wanted) for synchronizer in synchronizers]
        counts = torch.tensor(is_wanted, device=self._strategy.world.device)
        self._strategy.start_gradients(counts, f"reached.{len(synchronizers)}")()
        return [each for each, count in zip(synchronizers, counts.tolist(), strict=True) if each and count > 0]

    def _compare(self) -> None:
        prepared, inputs = self._prepared, self._batches.first_inputs
        if not self._has_twins:
            # Inputs may be the same where losses are over different parts, such as the nodes of a graph.
            batch = (inputs, self._losses[0][1].item()) if inputs and self._losses else None
            self._has_twins = warn_of_twins(self._strategy, batch)
        self._tell_of_not_finite()
        prepared.check_known()
        # Within no_sync, each rank's weights may differ for a while, as in sharpness-aware minimization.
        equal = all(each.weights_are_equal for each in prepared.synchronizers) and not self._had_no_sync
        self._periodic.compare(
            self._exchanges,
            self._batches.position,
            {known.number: optimizer for optimizer, known in prepared.optimizers.items()},
            prepared.numbered_models if equal and not self._strategy.shards else {},
        )

    # An optimizer's step.

    def _before_step(
        self, known: PreparedOptimizer, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if known.running_at == self._prepared.backwards and not self._is_unfinished:
            return None  # this is the parent class's step, called by the subclass's
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            if self._checks_scale:
                check_step_is_scaled()
            for synchronizer in self._check_step(known, optimizer):
                synchronizer.before_step()
            return None
        if self._checks_scale or self._config.low_communication_setting:
            raise ConfigError("a closure cannot be combined with fp16, powersgd or sync_every")
        known.running_at = self._prepared.backwards
        averaging = partial(self._mean_of, closure, known, optimizer)
        if len(args) > 1:
            return (args[0], averaging, *args[2:]), kwargs
        return args, {**kwargs, "closure": averaging}

    def _mean_of(self, closure: Callable[[], Any], known: PreparedOptimizer, optimizer: Optimizer) -> Any:
        """Return the mean over all ranks of a closure's loss, so that they all decide alike by it. Collective."""
        loss = closure()
        self._check_step(known, optimizer)
        if loss is None:
            return None
        world, weight = self._strategy.world, self._weight
        mean = torch.as_tensor(loss, device=world.device).detach().double()
        mean = mean * weight if weight else torch.zeros_like(mean)
        return (self._strategy.all_reduce(mean) / world.size).to(getattr(loss, "dtype", torch.float64))

    def _check_step(self, known: PreparedOptimizer, optimizer: Optimizer) -> list[Synchronizer]:
        """Check that a step has complete gradients, all-reduce local ones, and return its models' synchronizers."""
        prepared = self._prepared
        if len(optimizer.param_groups) != known.groups:
            prepared.check_groups(known, optimizer)
        is_repeated = self._is_unfinished or prepared.backwards == known.backwards_at_step
        if not self._batches.current.closes_update:
            raise TrainerError(
                f"optimizer.step() came before the update's {self._config.accumulate} batches were complete; the last "
                "batch of an epoch closes an update as well, so count none: step where run.sync_gradients is true"
            )
        if is_repeated and any(parameter.grad is not None for parameter in parameters_of(optimizer)):
            raise TrainerError(
                "optimizer.step() found gradients, but run.backward has not returned since its last step; call "
                "run.backward(loss) before each step, which no gradient's hook may take, and zero gradients after it"
            )
        known.backwards_at_step = known.running_at = prepared.backwards
        wanted, synchronizers = [], [*filter(None, map(call, known.synchronizers))]
        for each in synchronizers:
            # This rank has kept its gradients, or has skipped a backward pass whose all-reduce the other ranks wait in.
            was_missed = each.stepped is None or id(optimizer) in each.stepped
            if each.has_local_gradients or (is_repeated and was_missed):
                wanted.append(each)
        if wanted:
            if self._checks_scale:
                raise TrainerError(
                    "scaler.step has unscaled gradients that were not all-reduced yet; under precision 'fp16' call "
                    "run.backward on every rank before each step, and run.synchronize() after run.no_sync, before "
                    "scaler.unscale_ and scaler.step"
                )
            self._all_reduce(wanted)
        for each in synchronizers:
            each.stepped = {id(optimizer)} | (each.stepped or set())
        return synchronizers

    def _after_step(
        self, known: PreparedOptimizer, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        known.running_at = None
        self._count_step()
        for synchronizer in filter(None, map(call, known.synchronizers)):
            synchronizer.after_step()

    def _count_step(self) -> None:
        """Count an update. Steps of several optimizers between two draws of the loaders are one."""
        is_new = not self._batches.has_loader or self._batches.draws != self._counted_draws
        self._counted_draws = self._batches.draws
        self.completed += is_new
        if not self._batches.has_loader:
            report_phase("training")  # as a loader does; else the phase of a checkpoint would never end
        report_step(self.completed, is_new=is_new)


def _number(loss: Tensor) -> Tensor:
    """Return what is kept of a loss: no view, which would keep all that it is a view of, nor memory of a CUDA graph."""
    value = loss.detach()
    is_its_own = not value.dim() and loss._base is None and value.device.type == "cpu"
    return value if is_its_own else value.sum()

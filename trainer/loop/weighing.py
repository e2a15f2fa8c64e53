"""The weight of each backward pass in the mean over all ranks.

Each rank's loss is the mean over its batch. With the batch's number of samples as the weight, the mean over ranks
is the mean over all their samples, also if the batches are uneven. A loader passes the weight along with each batch;
without a loader, the script gives the number of samples.
"""

from __future__ import annotations

import sys

import torch

from trainer.cluster.output import print_line
from trainer.data.base import Step
from trainer.errors import ConfigError, TrainerError
from trainer.loop.batches import Batch, Batches
from trainer.loop.gradients import Marks, has_changed, mark
from trainer.loop.prepared import Prepared
from trainer.strategies.base import Strategy

_AHEAD = (
    "trainer: WARNING: it is unclear which batch of run.loader a backward pass belongs to, because the model's inputs "
    "are none of the loader's tensors, and other batches were drawn meanwhile: uneven batches may get wrong weights. "
    "Transform batches in the dataset or in the model, draw each right before its pass, or give "
    "run.backward(loss, samples=…)"
)


_COUNT_DIFFERENTLY = (
    "the loss is of several batches of run.loader that count differently, such as the last batches of two loaders; "
    "call run.backward once for each batch's loss, right after its forward pass"
)


class Weighing:
    """The weights of a `Run`'s backward passes.

    Args:
        accumulate: backward passes per update, if no loader says when an update is complete.
    """

    def __init__(self, strategy: Strategy, accumulate: int, prepared: Prepared, batches: Batches) -> None:
        self._strategy, self._accumulate, self._prepared, self.batches = strategy, accumulate, prepared, batches
        self._has_warned = False
        self._passes = 0
        self._samples = 0.0
        """This rank's samples in the earlier passes of the current update."""
        self._before: Marks | None = None
        """The gradients before the first of the update's passes; None during that first pass."""
        self.weight = 1.0
        """The weight of the last backward pass: the factor on its loss."""
        self.is_local = False
        """Whether a later pass of the same update will send the last pass's gradients."""

    def begin_pass(self, samples: float | None, *, is_sum: bool, is_in_no_sync: bool) -> None:
        """Weigh the backward pass that begins now. Collective if `samples` is given.

        Args:
            samples: how many samples this rank's loss is a mean over; None takes the loader's weight.
            is_sum: whether the loss is a sum over them, which counts as often as there are ranks, in a mean over these.

        Raises:
            TrainerError: the loss combines batches with different weights, or several models were prepared, so that it
                is unclear which passes form an update.
            ConfigError: `samples` is not a number that is at least 0.
        """
        batches = self.batches
        if not batches.has_loader and self._accumulate > 1:
            self._count_pass()
        self.is_local = is_in_no_sync or not batches.current.closes_update
        seen = batches.pop_forwarded_batches() if batches.is_watching or samples is not None else []
        if samples is not None:
            self.weight = self._weight_of_samples(samples if self._has_samples(seen) else 0.0)
        elif is_sum:
            self.weight = float(self._strategy.world.size) if self._has_samples(seen) else 0.0
        elif batches.has_loader:
            self.weight = self._weight_of_batches(seen) if batches.is_watching else batches.current.weight
        else:
            self.weight = 1 / self._accumulate

    def _count_pass(self) -> None:
        """Count a pass without a loader: every `accumulate` passes form an update."""
        if (models := len(self._prepared.models)) > 1:
            raise TrainerError(
                f"accumulate is {self._accumulate}, and there are {models} models and no batch of run.loader, so "
                "it is unclear which backward passes form an update; use run.no_sync and run.backward's samples"
            )
        self._passes += 1
        closes = self._passes % self._accumulate == 0
        self.batches.activate(Step(None, 1, 1 / self._accumulate, closes))

    def _has_samples(self, seen: list[Batch]) -> bool:
        """Return whether the pass's batches are no padding; of a loader's batches, the last counts."""
        found = set({batch.loader: batch.step.count > 0 for batch in seen}.values())
        if len(found) > 1:
            raise TrainerError(_COUNT_DIFFERENTLY)
        return found.pop() if found else self.batches.current.count > 0

    def _weight_of_batches(self, seen: list[Batch]) -> float:
        # With two batches of the same loader, the script has skipped the backward pass of the first: the last counts.
        weights = set({batch.loader: batch.step.weight for batch in seen}.values())
        if len(weights) > 1:
            raise TrainerError(_COUNT_DIFFERENTLY)
        if not seen and self.batches.batch_is_ambiguous and not self._has_warned:
            self._has_warned = True
            print_line(_AHEAD, sys.stderr)
        return weights.pop() if weights else self.batches.current.weight

    def _weight_of_samples(self, samples: float) -> float:
        if not 0 <= samples < float("inf"):
            raise ConfigError(f"samples is {samples!r}; it must be a number that is at least 0")
        self._samples += samples
        # The gradients of the earlier passes are sums over samples: only the last pass knows by what to divide them.
        if self.is_local:
            if self._before is None:
                self._before = mark(self._prepared.trained())
            return samples
        world = self._strategy.world
        samples_here = torch.tensor(self._samples, dtype=torch.float64, device=world.device)
        total = float(self._strategy.all_reduce(samples_here)) if world.size > 1 else self._samples
        per_sample = world.size / total if total else 0.0
        if self._before is not None:
            self._scale_earlier_passes(per_sample, self._before)
        self._samples, self._before = 0.0, None
        return samples * per_sample

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

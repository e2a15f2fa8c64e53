"""Find out which of the loaders' batches a forward and a backward pass compute on.

The inputs of a prepared model's forward pass are compared with the tensors of the batches, so that batches may be drawn
ahead, kept, or drawn from several loaders in turns. If no input is a batch's tensor, the batch drawn last counts.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer.cluster.output import print_line
from trainer.cluster.world import World
from trainer.data.base import NO_STEP, Loader, Observer
from trainer.data.batches import Step, tensors_in
from trainer.data.loader import digest
from trainer.errors import TrainerError
from trainer.loop.prepared import at_end
from trainer.models.global_batch import GlobalBatch

_PADDING = (
    "trainer: rank {} computes on a padding batch, because fewer than two samples a rank are left in this step: it "
    "counts in no gradient and no BatchNorm. What the script itself keeps of each batch (a queue, an average) should "
    "leave it out: run.batch_samples is 0"
)
_NO_BATCH = (
    "trainer: WARNING: run.mean()'s add is called outside of the run's loaders, where each value has the same weight, "
    "however many samples it is of: pass samples=, or give that DataLoader to run.prepare(…, evaluation=loader)"
)
_AHEAD = (
    "trainer: WARNING: it is unclear which batch of run.loader a backward pass belongs to, because the model's inputs "
    "are none of the loader's tensors, and other batches were drawn meanwhile: uneven batches may get wrong weights. "
    "Transform batches in the dataset or in the model, draw each right before its pass, or give "
    "run.backward(loss, samples=…)"
)


Position = tuple[int, int, int]
"""A batch's place in the training, to compare the ranks by: the numbers of its loader, its epoch, and the batch, which
counts from the loader's first."""
_FORGET_EVERY = 64
"""Draws after which tensors that nobody holds any more are forgotten together."""


class Batches(Observer):
    """The batches of a `Run`'s loaders: the one place that knows which of them the script computes on.

    Args:
        accumulate: steps of a loader that form an update.
        global_batch: is told whether this rank's samples count.
    """

    def __init__(self, world: World, accumulate: int, global_batch: GlobalBatch) -> None:
        self._world, self.global_batch = world, global_batch
        self._is_watching = world.size > 1 or accumulate > 1
        """Whether it matters which batch a pass computes on. Otherwise each has weight 1 and closes an update."""
        self.current = NO_STEP
        """The step that the next backward pass belongs to, as far as is known."""
        self.position: Position | None = None
        """The position of that step's batch; None if it is not from a loader."""
        self.has_loader = False
        """Whether a loader of the run has yielded a training batch."""
        self.draws = 0
        """Training batches that loaders have yielded, and passes over loaders that have ended."""
        self.update = 0
        """Grows when the batches of an update are over, by the next draw or the end of a pass over a loader."""
        self.first_inputs: object = None
        """Digest of the first tensor in the first forward pass; None if it cannot be read."""
        self.in_uneven_evaluation = False
        """Whether an evaluation runs in which some ranks have fewer batches than others."""
        self.is_in_pass = False
        """Whether a backward pass runs, in which a forward pass computes activations anew."""
        self._evaluated: Step | None = None
        self._known = Step(None, 1, 1.0, True)
        """The last draw's step, without its batch; the same object as long as batches count alike."""
        self._by_tensor: dict[int, tuple[weakref.ref[Tensor], Step, Position]] = {}
        """By id, the tensors of batches, each with its step, without the batch itself, and position."""
        self._forwarded: dict[int, Step] = {}
        """By the loader's number, the last step of which a forward pass has computed since the last backward pass."""
        self._thread = threading.get_ident()
        self._drawn: Counter[int] = Counter()
        self._weights: set[float] = set()
        """The weights of the batches that were drawn since the last backward pass."""
        self._epoch = 0
        self._is_uneven = self._has_digest = self._has_warned = False
        self._has_told_of_padding = self._has_told_of_weight = False

    def weight_of_mean(self) -> int:
        """Return the samples of the batch that was drawn last, also in an evaluation; 1 outside of loops over loaders.

        Rank 0 says so the first time, if there is a loader: a script may have left another one to itself.
        """
        if self._evaluated is not None:
            return self._evaluated.count
        if self.has_loader and self.current is NO_STEP and not self._has_told_of_weight:
            self._has_told_of_weight = True
            if self._world.is_root:
                print_line(_NO_BATCH, sys.stderr)
        return self.current.count if self.has_loader else 1

    def drawn(self, loader: Loader, step: Step) -> None:
        is_ahead = threading.get_ident() != self._thread  # a thread that draws ahead knows nothing of the passes
        if self._evaluated is not None and not is_ahead:
            self.evaluated(loader, None)  # an evaluation's iterator may be kept for later
        self.has_loader = True
        self.draws += 1
        self.update += self.current.closes_update
        count, weight, closes_update, known = step.count, step.weight, step.closes_update, self._known
        if known.count != count or known.weight != weight or known.closes_update is not closes_update:
            known = self._known = Step(None, count, weight, closes_update)
        if self._is_watching:
            position = self._remember(loader.number, step, known)
            if is_ahead:
                return
            self.position = position
            self._forwarded.pop(loader.number, None)  # this loader's earlier batches have had no backward pass
        if known is not self.current:
            self.activate(known)

    def _remember(self, number: int, step: Step, known: Step) -> Position:
        """Remember which batch its tensors belong to; return its position."""
        self._drawn[number] += 1
        position = number, step.epoch, self._drawn[number]
        if position[2] == 1 or step.epoch != self._epoch:
            self._is_uneven, self._epoch = False, step.epoch
        self._is_uneven |= step.weight != 1.0
        self._weights.add(step.weight)
        for tensor in tensors_in(step.batch):
            self._by_tensor[id(tensor)] = weakref.ref(tensor), known, position
        if self._drawn[number] % _FORGET_EVERY == 0:
            for key, each in [*self._by_tensor.items()]:
                if each[0]() is None and self._by_tensor.get(key) is each:  # else another thread has replaced it
                    del self._by_tensor[key]
        return position

    def ended(self, loader: Loader, *, was_left: bool) -> None:
        self.evaluated(loader, None)
        self.draws += 1
        self.update += 1
        self.activate(NO_STEP)

    def evaluated(self, loader: Loader, step: Step | None) -> None:
        self._evaluated, self.in_uneven_evaluation = step, step is not None and not loader.is_even

    def watch(self, model: nn.Module) -> None:
        """Match the inputs of a model's forward passes with batches."""
        if self._is_watching:
            hook = model.register_forward_pre_hook(_Hook(self), with_kwargs=True, prepend=True)
            at_end(model, hook.remove)

    def on_forward(self, inputs: tuple[Any, ...]) -> None:
        """Find the batch that a forward pass computes on."""
        if self.is_in_pass or (self._has_digest and not self._by_tensor):
            return
        tensors = tensors_in(inputs)
        if not self._has_digest and self._world.size > 1:
            self._has_digest, self.first_inputs = True, _digest(tensors[0]) if tensors else None
        for tensor in tensors:
            for held in (tensor, tensor._base):  # which is None unless it is a view, of a batch's tensor say
                known = self._by_tensor.get(id(held))
                if known is not None and known[0]() is held:
                    _, step, self.position = known
                    self._forwarded.pop(self.position[0], None)
                    self._forwarded[self.position[0]] = step
                    if step is not self.current:
                        self.activate(step)
                    return

    def activate(self, step: Step) -> None:
        """Make `step` the current step, whose forward and backward pass are about to begin."""
        self.current, is_padding = step, not step.count
        if is_padding is self.global_batch.counts:
            self.global_batch.leave_out(is_padding)
            # The last rank is the first that runs out of samples.
            if is_padding and not self._has_told_of_padding and self._world.rank == self._world.size - 1:
                self._has_told_of_padding = True
                print_line(_PADDING.format(self._world.rank), sys.stderr)

    def step_of_pass(self, *, is_weighed: bool) -> Step:
        """Return the step that the backward pass which begins now belongs to.

        Args:
            is_weighed: whether the script weighs the pass itself, so that it only matters whether its batch is padding.

        Raises:
            TrainerError: since the last backward pass, forward passes computed on batches that count differently.
        """
        self._thread = threading.get_ident()
        if not self._is_watching:
            return self.current
        # With two batches of the same loader, the script has skipped the backward pass of the first: the last counts.
        steps, weights = [*self._forwarded.values()], len(self._weights)
        self._forwarded.clear()
        self._weights.clear()
        if len(steps) > 1 and len({bool(step.count) if is_weighed else step.weight for step in steps}) > 1:
            raise TrainerError(
                "the loss is of several batches of run.loader that count differently, such as the last batches of two "
                "loaders; call run.backward once for each batch's loss, right after its forward pass"
            )
        # Unmatched, it may belong to a batch of another weight than the current one.
        is_ambiguous = weights > 1 or (self.current is NO_STEP and self._is_uneven)
        if is_ambiguous and not steps and not is_weighed and not self._has_warned:
            self._has_warned = True
            print_line(_AHEAD, sys.stderr)
        return steps[-1] if steps else self.current


class _Hook:
    """Forward hook that reports a module's inputs to `Batches` as long as that lives."""

    def __init__(self, batches: Batches) -> None:
        self._batches = weakref.ref(batches)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        # A compiled pass would compile this as well, and not run it.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if (batches := self._batches()) is not None:
            batches.on_forward((*args, *options.values()))

    @property
    def __name__(self) -> str:  # which torch.jit.script alone asks for
        raise AttributeError(
            "torch.jit.script compiles the hook that run.prepare has added to the model; script a new model that has "
            "loaded run.state_dict(model), or take torch.jit.trace or torch.export"
        )

    def __deepcopy__(self, memo: object) -> _Hook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave something that does nothing in a file of the whole model, which is loaded without this library."""
        return getattr, (nullcontext(), "__exit__")


def _digest(tensor: Tensor) -> object:
    """Return a digest of a tensor's values; None where they cannot be read, as within torch.func or a trace."""
    try:
        return None if torch.jit.is_tracing() else (tensor.shape, digest(tensor))  # type: ignore[attr-defined, no-untyped-call]
    except (RuntimeError, TypeError):
        return None

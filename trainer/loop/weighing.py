"""Weighing: what each backward pass counts for in the mean over all ranks.

The mean over ranks is that over samples if each rank's loss, a mean over its own batch, counts as many samples as that
batch has. A loader knows these weights. They travel with the batch: the forward pass of a prepared model tells by its
inputs which batch it is of, so that batches may be drawn ahead, kept, or drawn from several loaders in turns. Where
the inputs are none of a loader's tensors, the batch that was drawn last counts.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.cluster.output import print_line
from trainer.data.base import NO_STEP, Step
from trainer.errors import ConfigError, TrainerError
from trainer.strategies.base import Strategy

_REMEMBERED = 64
_AHEAD = (
    "trainer: WARNING: it cannot be told of which batch of run.loader a backward pass is, because the model's inputs "
    "are none of the loader's tensors, and other batches were drawn since: uneven ones may count as even ones. "
    "Transform batches in the dataset or in the model, draw each right before its pass, or give "
    "run.backward(loss, samples=…)"
)


class Weighing:
    """The batches of one `Run`: which one a backward pass is of, and what it counts for.

    Args:
        accumulate: backward passes of an update, where no loader says when it is complete.
        on_step: called when another batch's forward and backward pass are about to begin.
    """

    def __init__(self, strategy: Strategy, accumulate: int, on_step: Callable[[Step], None]) -> None:
        self._strategy, self._accumulate, self._on_step = strategy, accumulate, on_step
        # Alone and without accumulation, each batch counts 1 and closes an update.
        self._is_watching = strategy.world.size > 1 or accumulate > 1
        self._current = NO_STEP
        self._steps: dict[int, tuple[weakref.ref[Tensor], _Drawn]] = {}
        """By the id of each tensor of a batch."""
        self._most = _REMEMBERED
        """Of these, after which those that nobody holds any more are left out."""
        self._seen: list[_Drawn] = []
        """The batches of the forward passes since the last backward pass, with their loaders' numbers."""
        self._thread = threading.get_ident()
        self._is_uneven = self._has_warned = False
        self._passes = 0
        self._epoch = 0
        self._samples = 0.0
        """Of the running update's earlier passes, on this rank."""
        self._before: dict[nn.Parameter, tuple[Tensor, int]] | None = None
        """The gradients before the first of these passes, with PyTorch's count of their changes."""
        self.has_loader = False
        """Whether a loader of the run has yielded a batch."""
        self.position: tuple[int, int, int] | None = None
        """Of the batch of the current pass: its loader's number, its epoch, and its number among all of this loader."""
        self._drawn: Counter[int] = Counter()
        self._weights: set[float] = set()
        """Of the batches that were drawn since the last backward pass."""
        self._is_in_pass = self._has_looked = False
        self.first_inputs: object = None
        """Stands for the first tensor of the first forward pass."""
        self.weight = 1.0
        """What the last backward pass has counted for."""

    @property
    def closes_update(self) -> bool:
        """Whether the current batch ends an update."""
        return self._current.closes_update

    @property
    def samples(self) -> int:
        """Samples in the batch that was drawn last; 0 for a padding batch."""
        return self._current.count

    def on_batch(self, step: Step, source: int) -> None:
        """Note a batch that a loader is about to yield, or the end of its epoch."""
        if step.batch is None:
            self._activate(step)
            return
        self.has_loader = True
        if not self._is_watching:
            self._activate(step)
            return
        self._drawn[source] += 1
        batch, step = step.batch, replace(step, batch=())  # what is remembered keeps no batch alive
        drawn = _Drawn(step, source, (source, step.epoch, self._drawn[source]))
        if self._drawn[source] == 1 or step.epoch != self._epoch:
            self._is_uneven, self._epoch = False, step.epoch
        self._is_uneven |= step.weight != 1.0
        self._weights.add(step.weight)
        self._remember(drawn, batch)
        if threading.get_ident() == self._thread:  # a thread that draws ahead knows nothing of the passes
            if self._seen:  # of which those of this loader have had no backward pass
                self._seen = [one for one in self._seen if one.source != source]
            self._activate(step, drawn.position)

    def _remember(self, drawn: _Drawn, batch: Any) -> None:
        if len(self._steps) > self._most:
            self._steps = {key: found for key, found in self._steps.items() if found[0]() is not None}
            self._most = max(_REMEMBERED, 2 * len(self._steps))
        for tensor in _tensors(batch):
            self._steps[id(tensor)] = (weakref.ref(tensor), drawn)

    def watch(self, model: nn.Module) -> None:
        """Look at the inputs of a model's forward passes."""
        if not self._is_watching:
            return
        for handle in _WATCHED.pop(model, ()):
            handle.remove()
        _WATCHED[model] = [model.register_forward_pre_hook(_Hook(self), with_kwargs=True, prepend=True)]

    def on_forward(self, inputs: Iterable[Any]) -> None:
        """Note which batch a forward pass is of."""
        if self._is_in_pass:  # activations that are computed anew
            return
        if not self._has_looked and self._strategy.world.size > 1:
            self._has_looked = True
            self.first_inputs = next((_digest(one) for one in _tensors(inputs)), None)
        if not self._steps:
            return
        for tensor in _tensors(inputs):
            found = self._drawn_with(tensor)
            if found is not None:
                self._seen.append(found)
                self._activate(found.step, found.position)
                return

    def _drawn_with(self, tensor: Tensor) -> _Drawn | None:
        for one in (tensor, tensor._base):
            found = self._steps.get(id(one)) if one is not None else None
            if found is not None and found[0]() is one:
                return found[1]
        return None

    def _activate(self, step: Step, position: tuple[int, int, int] | None = None) -> None:
        if position is not None:
            self.position = position
        if step is not self._current:
            self._current = step
            self._on_step(step)

    def weight_of_pass(
        self, samples: float | None, is_local: bool, parameters: Callable[[], Iterator[nn.Parameter]]
    ) -> float:
        """Return the factor on the loss of the backward pass that begins now. Collective where `samples` are given.

        Args:
            samples: what this rank's loss is a mean over; None asks the loader.
            is_local: whether another pass of the same update follows.
            parameters: those that are trained.

        Raises:
            TrainerError: the loss is of batches with different weights.
            ConfigError: `samples` is not a number that is at least 0.
        """
        if samples is None and self.has_loader and not self._is_watching:
            self.weight = self._current.weight
            return self.weight
        self._thread = threading.get_ident()
        seen, self._seen = self._seen, []
        if samples is not None:
            self.weight = self._weigh(samples, is_local, parameters)
        elif self.has_loader:
            self.weight = self._weight_of(seen)
        else:
            self.weight = 1 / self._accumulate
        self._is_in_pass = True
        return self.weight

    def after_pass(self) -> None:
        """Note that the backward pass is over, or has ended in an error."""
        self._is_in_pass = False
        self._weights.clear()

    def before_pass(self, models: int) -> None:
        """Count a backward pass where no loader does: it closes the update that `accumulate` of them form.

        Args:
            models: that were prepared, and may have passes of their own.

        Raises:
            TrainerError: it cannot be told which passes form an update.
        """
        if not self.has_loader and self._accumulate > 1:
            if models > 1:
                raise TrainerError(
                    f"accumulate is {self._accumulate}, and there are {models} models and no batch of run.loader: it "
                    "cannot be told which backward passes form an update; use run.no_sync and run.backward's samples"
                )
            self._passes += 1
            closes = self._passes % self._accumulate == 0
            self._activate(Step(None, 1, 1 / self._accumulate, closes))

    def _weight_of(self, seen: list[_Drawn]) -> float:
        # Of two passes with batches of one loader, the first one's backward pass was skipped.
        by_source = {drawn.source: drawn.step.weight for drawn in seen}
        weights = set(by_source.values())
        if len(weights) > 1:
            raise TrainerError(
                "the loss is of several batches of run.loader that count differently, as the last ones of two loaders "
                "do; call run.backward once for each batch's loss, right after its forward pass"
            )
        is_unclear = len(self._weights) > 1 or (self._current is NO_STEP and self._is_uneven)
        if not seen and is_unclear and not self._has_warned:
            self._has_warned = True
            print_line(_AHEAD, sys.stderr)
        return weights.pop() if weights else self._current.weight

    def _weigh(self, samples: float, is_local: bool, parameters: Callable[[], Iterator[nn.Parameter]]) -> float:
        if not 0 <= samples < float("inf"):
            raise ConfigError(f"samples is {samples!r}; it must be a number that is at least 0")
        self._samples += samples
        if is_local:  # how many samples the update has is known with its last pass
            if self._before is None:
                held = ((one, one.grad) for one in parameters())
                self._before = {one: (grad, grad._version) for one, grad in held if grad is not None}
            return samples
        world = self._strategy.world
        own = torch.tensor(self._samples, dtype=torch.float64, device=world.device)
        total = float(self._strategy.all_reduce(own)) if world.size > 1 else self._samples
        each = world.size / total if total else 0.0
        if self._before is not None:
            self._scale_earlier_passes(each, parameters)
        self._samples, self._before = 0.0, None
        return samples * each

    def _scale_earlier_passes(self, each: float, parameters: Callable[[], Iterator[nn.Parameter]]) -> None:
        for parameter in parameters():
            gradient, before = parameter.grad, self._before.get(parameter) if self._before is not None else None
            if gradient is None or (before and before[0] is gradient and before[1] == gradient._version):
                continue  # no pass of this update has reached it
            if before is not None and before[0] is gradient:
                raise TrainerError(
                    "an update of several passes with samples was begun on gradients of an earlier one; call zero_grad "
                    "before its first pass"
                )
            gradient.detach().mul_(each)


@dataclass(frozen=True)
class _Drawn:
    """A batch that was drawn."""

    step: Step
    source: int
    """Number of its loader."""
    position: tuple[int, int, int]


class _Hook:
    """Tells a `Weighing`, as long as it lives, of the forward passes of a module."""

    def __init__(self, weighing: Weighing) -> None:
        self._weighing = weakref.ref(weighing)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        # A compiled pass would compile this as well, and not run it.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if (weighing := self._weighing()) is not None:
            weighing.on_forward((*args, *options.values()))

    def __deepcopy__(self, memo: object) -> _Hook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave something that does nothing in a file of the whole model, which is loaded without this library."""
        return getattr, (nullcontext(), "__exit__")


def _digest(tensor: Tensor) -> object:
    """Return what stands for a tensor's values; None where they cannot be read, as within torch.func or a trace."""
    try:
        if tensor.layout is not torch.strided or torch._C._get_tracing_state() is not None:
            return None
        numbers = tensor.detach().reshape(-1)[:4096].cpu().view(torch.uint8).numpy()
    except (RuntimeError, TypeError):
        return None
    return tuple(tensor.shape), hashlib.sha256(numbers.tobytes()).hexdigest()


_WATCHED: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors within nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)

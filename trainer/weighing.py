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
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.base import NO_STEP, Step
from trainer.errors import ConfigError, TrainerError
from trainer.launch.output import print_line
from trainer.strategies.base import Strategy

_REMEMBERED = 64
"""Tensors of batches, after which those that nobody holds any more are left out."""
_AHEAD = (
    "trainer: WARNING: run.backward came after the last batch of the loader's epoch, and the model's inputs are none "
    "of the loader's tensors: uneven batches count as even ones. Transform batches in the dataset or in the model, "
    "draw each right before its backward pass, or give run.backward(loss, samples=…)"
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
        self._steps: dict[int, tuple[weakref.ref[Tensor], int, Step]] = {}
        """By the id of each tensor of a batch."""
        self._seen: list[tuple[int, Step]] = []
        """The batches of the forward passes since the last backward pass, with their loaders' numbers."""
        self._thread = threading.get_ident()
        self._is_uneven = self._has_warned = False
        self._passes = 0
        self._samples = 0.0
        """Of the running update's earlier passes, on this rank."""
        self.has_loader = False
        """Whether a loader of the run has yielded a batch."""
        self.position = (0, 0, 0)
        """Of the last batch that was drawn: its loader's number, its epoch, and how many this loader has yielded."""
        self._drawn: Counter[int] = Counter()
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
        if self.position[1] != step.epoch:
            self._is_uneven = False
        self._drawn[source] += 1
        self.has_loader, self.position = True, (source, step.epoch, self._drawn[source])
        self._is_uneven |= step.weight != 1.0
        if self._is_watching:
            self._remember(source, step)
        if threading.get_ident() == self._thread:  # a thread that draws ahead knows nothing of the passes
            if self._seen:  # of which those of this loader have had no backward pass
                self._seen = [one for one in self._seen if one[0] != source]
            self._activate(step)

    def _remember(self, source: int, step: Step) -> None:
        if len(self._steps) > _REMEMBERED:
            self._steps = {key: found for key, found in self._steps.items() if found[0]() is not None}
        for tensor in _tensors(step.batch):
            self._steps[id(tensor)] = (weakref.ref(tensor), source, step)

    def watch(self, model: nn.Module) -> None:
        """Look at the inputs of a model's forward passes."""
        if not self._is_watching:
            return
        for handle in _WATCHED.pop(model, ()):
            handle.remove()
        _WATCHED[model] = [model.register_forward_pre_hook(_Hook(self), with_kwargs=True, prepend=True)]

    def on_forward(self, inputs: Iterable[Any]) -> None:
        """Note which batch a forward pass is of."""
        if self.first_inputs is None and self._strategy.world.size > 1:
            self.first_inputs = next((_digest(one) for one in _tensors(inputs)), None)
        if not self._steps:
            return
        for tensor in _tensors(inputs):
            found = self._step_of(tensor)
            if found is not None:
                self._seen.append(found)
                self._activate(found[1])
                return

    def _step_of(self, tensor: Tensor) -> tuple[int, Step] | None:
        for one in (tensor, tensor._base):
            found = self._steps.get(id(one)) if one is not None else None
            if found is not None and found[0]() is one:
                return found[1:]
        return None

    def _activate(self, step: Step) -> None:
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
        seen, self._seen = self._seen, []
        if samples is not None:
            self.weight = self._weigh(samples, is_local, parameters)
        elif self.has_loader:
            self.weight = self._weight_of(seen)
        else:
            self.weight = 1 / self._accumulate
        return self.weight

    def before_pass(self) -> None:
        """Count a backward pass where no loader does: it closes the update that `accumulate` of them form."""
        if not self.has_loader and self._accumulate > 1:
            self._passes += 1
            closes = self._passes % self._accumulate == 0
            self._activate(Step(None, 1, 1 / self._accumulate, closes))

    def _weight_of(self, seen: list[tuple[int, Step]]) -> float:
        weights = {step.weight for _, step in seen}
        if len(weights) > 1:
            raise TrainerError(
                "the loss is of several batches of run.loader that count differently, as the last ones of two loaders "
                "do; call run.backward once for each batch's loss, right after its forward pass"
            )
        if not seen and self._current is NO_STEP and self._is_uneven and not self._has_warned:
            self._has_warned = True
            print_line(_AHEAD, sys.stderr)
        return weights.pop() if weights else self._current.weight

    def _weigh(self, samples: float, is_local: bool, parameters: Callable[[], Iterator[nn.Parameter]]) -> float:
        if not 0 <= samples < float("inf"):
            raise ConfigError(f"samples is {samples!r}; it must be a number that is at least 0")
        self._samples += samples
        if is_local:  # how many samples the update has is known with its last pass
            return samples
        world = self._strategy.world
        own = torch.tensor(self._samples, dtype=torch.float64, device=world.device)
        total = float(self._strategy.all_reduce(own)) if world.size > 1 else self._samples
        each, is_first = world.size / total if total else 0.0, self._samples == samples
        self._samples = 0.0
        if not is_first:
            for parameter in parameters():
                if parameter.grad is not None:
                    parameter.grad.detach().mul_(each)
        return samples * each


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
    return tuple(tensor.shape), hashlib.sha256(_bytes(tensor)).hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1)[:4096].cpu().view(torch.uint8).numpy().tobytes()


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

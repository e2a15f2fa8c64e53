"""Find out which of the loaders' batches a forward and a backward pass compute on.

The inputs of a prepared model's forward pass are compared with the tensors of the batches, so that batches may be drawn
ahead, kept, or drawn from several loaders in turns. If no input is a batch's tensor, the batch drawn last counts.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from trainer.data.base import NO_STEP, Step
from trainer.loop.prepared import at_end
from trainer.models.sharded import tensors_in


class Batch(NamedTuple):
    """A batch that a loader has yielded, without its tensors."""

    step: Step
    """The step, without the batch itself, which would be kept alive."""
    position: tuple[int, int, int]
    """The loader's number, its epoch, and the batch's number, counted from the loader's first batch."""

    @property
    def loader(self) -> int:
        """The loader's number."""
        return self.position[0]


class Batches:
    """The batches that a `Run` trains on.

    Args:
        ranks: the world size.
        is_watching: whether it matters which batch a pass computes on. On a single rank without accumulation each has
            weight 1 and closes an update.
        on_step: called when another batch's forward and backward pass are about to begin.
    """

    def __init__(self, ranks: int, *, is_watching: bool, on_step: Callable[[Step], None]) -> None:
        self._ranks, self.is_watching, self._on_step = ranks, is_watching, on_step
        self.current = NO_STEP
        """The step that the next backward pass belongs to, as far as is known."""
        self.position: tuple[int, int, int] | None = None
        """The position of that step's batch, as in `Batch`; None if it is not from a loader."""
        self.has_loader = False
        """Whether a loader of the run has yielded a batch."""
        self.first_inputs: object = None
        """Digest of the first tensor in the first forward pass; None if it cannot be read."""
        self._by_tensor: Any = WeakIdKeyDictionary()
        """From each tensor of a batch to the batch, as long as somebody holds the tensor."""
        self._forwarded: list[Batch] = []
        """The batches of the forward passes since the last backward pass."""
        self._thread = threading.get_ident()
        self._drawn: Counter[int] = Counter()
        self._weights: set[float] = set()
        """The weights of the batches that were drawn since the last backward pass."""
        self._epoch = 0
        self.is_in_pass = False
        """Whether a backward pass runs, in which a forward pass computes activations anew."""
        self._is_uneven = self._digested_first_input = False

    @property
    def batch_is_ambiguous(self) -> bool:
        """Whether a pass that was matched to no batch may belong to a batch of another weight than the current one."""
        return len(self._weights) > 1 or (self.current is NO_STEP and self._is_uneven)

    def on_batch(self, loader: int, step: Step) -> None:
        """Note a batch that a loader is about to yield, or the end of its epoch."""
        self.has_loader |= step.batch is not None
        if step.batch is None or not self.is_watching:
            self.activate(step)
            return
        self._drawn[loader] += 1
        batch = Batch(replace(step, batch=()), (loader, step.epoch, self._drawn[loader]))
        if self._drawn[loader] == 1 or step.epoch != self._epoch:
            self._is_uneven, self._epoch = False, step.epoch
        self._is_uneven |= step.weight != 1.0
        self._weights.add(step.weight)
        for _, tensor in tensors_in(step.batch):
            self._by_tensor[tensor] = batch
        if threading.get_ident() == self._thread:  # a thread that draws ahead knows nothing of the passes
            if self._forwarded:  # this loader's earlier batches have had no backward pass
                self._forwarded = [seen for seen in self._forwarded if seen.loader != loader]
            self.activate(batch.step, batch.position)

    def watch(self, model: nn.Module) -> None:
        """Match the inputs of a model's forward passes with batches."""
        if self.is_watching:
            hook = model.register_forward_pre_hook(_Hook(self), with_kwargs=True, prepend=True)
            at_end(model, hook.remove)

    def on_forward(self, inputs: tuple[Any, ...]) -> None:
        """Find the batch that a forward pass computes on."""
        if self.is_in_pass:
            return
        if not self._digested_first_input and self._ranks > 1:
            self._digested_first_input = True
            self.first_inputs = next((_digest(tensor) for _, tensor in tensors_in(inputs)), None)
        if not self._by_tensor:
            return
        for _, tensor in tensors_in(inputs):
            if (batch := self._batch_of(tensor)) is not None:
                self._forwarded.append(batch)
                self.activate(batch.step, batch.position)
                return

    def _batch_of(self, tensor: Tensor) -> Batch | None:
        batch: Batch | None = self._by_tensor.get(tensor)
        if batch is None and tensor._base is not None:  # a view of a batch's tensor
            batch = self._by_tensor.get(tensor._base)
        return batch

    def activate(self, step: Step, position: tuple[int, int, int] | None = None) -> None:
        """Make `step` the current step."""
        if position is not None:
            self.position = position
        if step is not self.current:
            self.current = step
            self._on_step(step)

    def pop_forwarded_batches(self) -> list[Batch]:
        """Return the batches of the forward passes since the last backward pass, and forget them."""
        self._thread = threading.get_ident()
        seen, self._forwarded = self._forwarded, []
        return seen

    def end_pass(self) -> None:
        """Note that the backward pass is over, or has ended in an error."""
        self.is_in_pass = False
        self._weights.clear()


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

    def __deepcopy__(self, memo: object) -> _Hook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave something that does nothing in a file of the whole model, which is loaded without this library."""
        return getattr, (nullcontext(), "__exit__")


def _digest(tensor: Tensor) -> object:
    """Return a digest of a tensor's values; None where they cannot be read, as within torch.func or a trace."""
    try:
        if tensor.layout is not torch.strided or torch._C._get_tracing_state() is not None:
            return None
        numbers = tensor.detach().reshape(-1)[:4096].cpu().view(torch.uint8).numpy()
    except (RuntimeError, TypeError):
        return None
    return tuple(tensor.shape), hashlib.sha256(numbers.tobytes()).hexdigest()

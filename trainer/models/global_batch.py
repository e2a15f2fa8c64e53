"""The batch of all ranks together: sums over it through which gradients pass, and what a padding batch leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.errors import TrainerError

AllReduce = Callable[[Tensor], Tensor]


class GlobalBatch:
    """Whether this rank's samples count in statistics, and the all-reduce of those that the ranks add up.

    Layers that add up hold it. Copies of a model share it, and so leave out the same batches. A pickled model has none.
    """

    counts = True
    """Whether this rank's samples count; False while it computes on a padding batch."""
    is_weighed = True
    """Whether this rank's loss counts; False while its backward pass has the weight 0, and may be NaN."""

    def __init__(self, all_reduce: AllReduce) -> None:
        self._all_reduce = all_reduce
        self._plain: WeakSet[_BatchNorm] = WeakSet()
        """BatchNorm layers whose statistics are of this rank's batches alone."""

    def follow(self, plain: Iterable[_BatchNorm]) -> None:
        """Also keep padding batches out of the running statistics of these layers, which do not ask `counts`."""
        self._plain.update(plain)

    def leave_out(self, is_padding: bool) -> None:
        """Leave the next batches out of all statistics because they are padding, or stop doing so."""
        self.counts = not is_padding
        for layer in self._plain:
            if is_padding:
                _MOMENTUM.setdefault(layer, layer.momentum)
                layer.momentum = 0.0
            elif layer in _MOMENTUM:
                layer.momentum = _MOMENTUM.pop(layer)

    def sum(self, tensor: Tensor, all_reduce: AllReduce | None = None) -> Tensor:
        """Return the sum over all ranks, through which gradients pass. Collective, as is its backward pass."""
        total: Tensor = _SumOverRanks.apply(tensor, self, all_reduce or self._all_reduce)
        return total

    def __deepcopy__(self, memo: Any) -> GlobalBatch:
        return self

    def __reduce__(self) -> Any:
        return GlobalBatch, (_left_the_job,)


_MOMENTUM: WeakKeyDictionary[_BatchNorm, float | None] = WeakKeyDictionary()
"""The momentum of plain layers while padding is left out; of the process, as two runs may have prepared a model."""


def _left_the_job(tensor: Tensor) -> Tensor:
    raise TrainerError(
        "a model with BatchNorm over the global batch was loaded from a file, without its job; build the model anew, "
        "load its state_dict, and prepare it"
    )


class _SumOverRanks(torch.autograd.Function):
    """Differentiable all-reduce: the gradient of a sum over ranks is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, batch: GlobalBatch, all_reduce: AllReduce) -> Tensor:
        ctx.batch, ctx.all_reduce = batch, all_reduce
        return all_reduce(tensor.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0] if ctx.batch.is_weighed else torch.zeros_like(gradients[0])
        # Through the function again: with `create_graph`, this sum has a gradient, too.
        return _SumOverRanks.apply(gradient, ctx.batch, ctx.all_reduce), None, None

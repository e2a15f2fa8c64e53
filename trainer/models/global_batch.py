"""Sums over the ranks within a forward pass, through which gradients pass: the batch of all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.errors import TrainerError

AllReduce = Callable[[Tensor], Tensor]


class GlobalBatch:
    """Whether this rank's samples count in what the ranks add up, and the all-reduce of statistics.

    Layers hold it. Copies of a model share it, and so leave out the same batches; pickled models leave it out.
    """

    counts = True
    """Whether this rank's samples count; False while it computes on a padding batch."""
    is_weighed = True
    """Whether this rank's loss counts; False while its backward pass has the weight 0, and may be NaN."""

    def __init__(self, all_reduce: AllReduce) -> None:
        self._all_reduce = all_reduce

    def sum(self, tensor: Tensor, all_reduce: AllReduce | None = None) -> Tensor:
        """Return the sum over all ranks, through which gradients pass. Collective, as is its backward pass."""
        total: Tensor = _SumOverRanks.apply(tensor, self, all_reduce or self._all_reduce)
        return total

    def __deepcopy__(self, memo: Any) -> GlobalBatch:
        return self

    def __reduce__(self) -> Any:
        return GlobalBatch, (_left_the_job,)


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

"""Metrics, and means that are exact over all ranks, however many samples each rank has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# Takes the model's outputs and the targets of a batch; returns the sum over its samples, a scalar tensor.
Metric = Callable[[Tensor, Tensor], Tensor]


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Count the correct predictions in a batch: outputs (samples, classes), targets (samples,) with class numbers."""
    return (outputs.argmax(dim=1) == targets).sum()


class Mean:
    """A running mean over the samples of all ranks. `add` sends nothing and does not wait for the device.

    Args:
        all_reduce: returns the sum of a tensor over all ranks.
        samples: returns the weight of a value for which `add` is given none.
        is_root: whether this is rank 0, which takes over all ranks' sums from a checkpoint.
    """

    def __init__(
        self,
        all_reduce: Callable[[Tensor, str], Tensor],
        samples: Callable[[], float],
        device: torch.device,
        is_root: bool,
    ) -> None:
        self._all_reduce, self._samples, self._is_root = all_reduce, samples, is_root
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        """The weighted sum of the values, and the sum of their weights."""

    def add(self, value: Tensor | float, samples: float | None = None) -> None:
        """Add a mean over `samples` samples of this rank; by default over those of the batch that was drawn last."""
        count = self._samples() if samples is None else samples
        if count:  # the mean over no samples may be NaN
            detached = value.detach() if isinstance(value, Tensor) else value
            self._sums[0] += detached * count
            self._sums[1] += count

    def read(self) -> float:
        """Return the mean over all ranks of what was added since the last call; NaN without samples. Collective."""
        total, count = self._all_reduce(self._sums, "sum").tolist()
        self._sums.zero_()
        return float(total / count) if count else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of all ranks, for `state` of the run's checkpoints. Collective."""
        total, count = self._all_reduce(self._sums, "sum").tolist()
        return {"total": total, "count": count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the sums of an earlier run, on any number of ranks."""
        values = (state["total"], state["count"]) if self._is_root else (0.0, 0.0)
        self._sums.copy_(torch.tensor(values, dtype=torch.float64))

"""Metrics as sums and counts, so that their mean over ranks is exact however many samples each rank had."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
        samples: returns what a value counts for where `add` is not told.
    """

    def __init__(
        self, all_reduce: Callable[[Tensor, str], Tensor], samples: Callable[[], float], device: torch.device
    ) -> None:
        self._all_reduce, self._samples = all_reduce, samples
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        """The weighed values, and what they count for together."""

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


class Sums:
    """Running sums of a few values, and the number of samples in them, on one rank.

    They stay on the device, in float64 (exact for counts up to 2^53), so that no batch waits for the device.
    """

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self.names = names
        self.count = 0
        self._sums = [torch.zeros((), dtype=torch.float64, device=device) for _ in names]
        self._read = (0.0, 0)

    def add(self, values: tuple[Tensor, ...], count: int) -> None:
        """Add one batch: a sum for each name, in their order, over `count` samples."""
        for total, value in zip(self._sums, values, strict=True):
            total += value.detach() if isinstance(value, Tensor) else value
        self.count += count

    def add_mean(self, mean: Tensor, count: int) -> None:
        """Add one batch by the mean of its only value, as one operation on the device."""
        (total,) = self._sums
        total.add_(mean.detach(), alpha=count)
        self.count += count

    def local_mean(self, name: str) -> float:
        """Return the mean over this rank's samples so far; 0.0 where it has none. Waits for the device."""
        return float(self._sums[self.names.index(name)]) / max(self.count, 1)

    def mean_since_last(self) -> float:
        """Return the mean of the only value over this rank's samples since the last call. Waits for the device."""
        (total,), (read, counted) = self._sums, self._read
        self._read = (float(total), self.count)
        return (self._read[0] - read) / max(self.count - counted, 1)

    def mean(self, all_reduce: Callable[[Tensor], Tensor]) -> tuple[Mapping[str, float], int]:
        """Return the means over the samples of all ranks, and the number of these samples. Collective.

        Args:
            all_reduce: sums a tensor over the ranks in place, as `Strategy.all_reduce` does.
        """
        device = self._sums[0].device
        count = torch.tensor(float(self.count), dtype=torch.float64, device=device)
        totals: list[float] = all_reduce(torch.stack([*self._sums, count])).tolist()
        samples = round(totals[-1])
        return {name: total / max(samples, 1) for name, total in zip(self.names, totals, strict=False)}, samples

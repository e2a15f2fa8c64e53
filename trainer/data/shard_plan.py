"""Shard plan: which sample goes to which rank in which step, computed by every rank without communication.

If batches come whole, the plan's "samples" are batches: each rank takes a single batch in a step.

No sample is padded, dropped or counted twice. Step k of N ranks with batch B takes the same samples as step k of a
single process with batch N·B: the next N·B in the epoch's order. Each rank takes a contiguous shard of them. Shards
differ by at most one sample, so that all ranks finish the last step together, too. Only if fewer than two samples per
rank are left do some ranks get none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import torch

from trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Shards of one epoch: a pure function of these numbers, the same on every rank.

    Raises:
        ConfigError: a number is not positive.
    """

    samples: int
    """Samples in the dataset."""
    world_size: int = 1
    batch_size: int = 1
    """Samples per rank and step."""
    global_batch_size: int | None = None
    """Samples of all ranks and step, instead of `batch_size`. It need not be divisible by the world size."""
    accumulate: int = 1
    """Steps whose gradients form one update."""
    start: int = 0
    """Samples of the epoch that were taken before, by any number of ranks; the steps are for the remaining samples."""

    def __post_init__(self) -> None:
        for name in ("samples", "world_size", "batch_size", "global_batch_size", "accumulate"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', ' ')} is {getattr(self, name)}; it must be at least 1")

    @cached_property
    def step_size(self) -> int:
        """Samples that all ranks together take in one full step."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        return self.batch_size * self.world_size

    @cached_property
    def steps(self) -> int:
        """Steps from `start` to the epoch's end, the same on every rank, a short last one included."""
        return -(-(self.samples - self.start) // self.step_size)

    @cached_property
    def equal_steps(self) -> int:
        """How many of the first steps are full, equally divided, and an update each, so that their weight is 1."""
        divided = self.global_batch_size is None or self.global_batch_size % self.world_size == 0
        return (self.samples - self.start) // self.step_size if self.accumulate == 1 and divided else 0

    def full_steps(self) -> ShardPlan:
        """Return the plan without the samples that do not fill the last step.

        Raises:
            ConfigError: there are too few for one step.
        """
        full = self.samples - (self.samples - self.start) % self.step_size
        if full == 0:
            raise ConfigError(
                f"drop_last leaves no step: there are {self.samples} samples, and all ranks take {self.step_size} in a "
                "step"
            )
        return replace(self, samples=full)

    def shard(self, step: int, rank: int) -> slice:
        """Return the positions in the epoch's order that `rank` takes in `step`; empty if none is left for it."""
        start = self.start + step * self.step_size
        left = min(self.step_size, self.samples - start)
        # BatchNorm cannot normalize a single sample, so ranks take at least two where the batch size allows it.
        ranks = max(-(-left // -(-self.step_size // self.world_size)), min(self.world_size, left // 2))
        if rank >= ranks:
            return slice(start + left, start + left)
        share, extra = divmod(left, ranks)
        begin = start + rank * share + min(rank, extra)
        return slice(begin, begin + share + (rank < extra))

    def shards(self, rank: int) -> Iterator[slice]:
        """Return the shards of all steps: those of full steps lie `step_size` apart."""
        full, first = (self.samples - self.start) // self.step_size, self.shard(0, rank)
        begins, ends = (range(at, at + full * self.step_size, self.step_size) for at in (first.start, first.stop))
        return chain(map(slice, begins, ends), (self.shard(step, rank) for step in range(full, self.steps)))

    def update(self, step: int) -> slice:
        """Return the positions in the epoch's order that all ranks together take in the update of `step`."""
        begin = self.start + (step - step % self.accumulate) * self.step_size
        return slice(begin, min(self.samples, begin + self.accumulate * self.step_size))

    def closes_update(self, step: int) -> bool:
        """Return whether the gradients are all-reduced and applied after this step."""
        return (step + 1) % self.accumulate == 0 or step + 1 == self.steps

    def weight(self, step: int, rank: int) -> float:
        """Return the factor on the local mean loss with which the mean over ranks is the mean over samples.

        local count · world size / global count, the global count being that of the whole update. It is
        exactly 1.0 in full, equally divided steps without accumulation, and 0.0 for a rank without samples.
        """
        update, shard = self.update(step), self.shard(step, rank)
        count, whole = (int(positions.stop - positions.start) for positions in (shard, update))
        return count * self.world_size / whole


def permutation(samples: int, *, epoch: int, seed: int) -> torch.Tensor:
    """Return the order of the samples in an epoch: int64, shape (samples,), the same on every rank and machine."""
    generator = torch.Generator().manual_seed(mix_seeds(seed, epoch))
    return torch.randperm(samples, generator=generator)


def mix_seeds(*numbers: int) -> int:
    """Mix several numbers into one 63-bit seed. A sum would collide: seed 0 with rank 1, and seed 1 with rank 0."""
    import numpy as np

    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))

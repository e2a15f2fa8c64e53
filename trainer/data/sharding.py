"""Which sample goes to which rank in which step: exact, and known to every rank without asking.

Nothing is padded, dropped or counted twice. Step k of N ranks with batch B takes the same samples as
step k of one process with batch N·B: the next N·B places of the epoch's permutation. Each rank takes
one contiguous piece of them, and pieces differ by at most one sample, so that in the last step, too,
all ranks finish together. Only where fewer than two samples per rank are left do some ranks stay empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """The plan of one epoch: a pure function of these numbers, the same on every rank.

    Raises:
        ConfigError: a number is not positive.
    """

    samples: int
    """Samples in the dataset."""
    world_size: int = 1
    batch_size: int = 1
    """Samples per rank and step."""
    accumulate: int = 1
    """Steps whose gradients form one update."""

    def __post_init__(self) -> None:
        for name in ("samples", "world_size", "batch_size", "accumulate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', ' ')} is {getattr(self, name)}; it must be at least 1")

    @property
    def step_size(self) -> int:
        """Samples that all ranks together take in one full step."""
        return self.batch_size * self.world_size

    @property
    def steps(self) -> int:
        """Steps in an epoch, the same on every rank, a short last one included."""
        return -(-self.samples // self.step_size)

    @property
    def updates(self) -> int:
        """Optimizer updates in an epoch; the last one may have fewer than `accumulate` steps."""
        return -(-self.steps // self.accumulate)

    def piece(self, step: int, rank: int) -> slice:
        """The places of the epoch's permutation that `rank` takes in `step`; empty when none is left for it."""
        start = step * self.step_size
        left = min(self.step_size, self.samples - start)
        # As many ranks as have two samples each, for BatchNorm cannot normalise one; and as many as it takes.
        holders = max(-(-left // self.batch_size), min(self.world_size, left // 2))
        if rank >= holders:
            return slice(start + left, start + left)
        share, extra = divmod(left, holders)
        begin = start + rank * share + min(rank, extra)
        return slice(begin, begin + share + (rank < extra))

    def closes_update(self, step: int) -> bool:
        """Whether the gradients are exchanged and applied after this step."""
        return (step + 1) % self.accumulate == 0 or step + 1 == self.steps

    def weight(self, step: int, rank: int) -> float:
        """What the local mean loss is multiplied by, so that the mean over ranks is the mean over samples.

        local count · world size / global count, the global count being that of the whole update. It is
        exactly 1.0 in full steps without accumulation, and 0.0 for a rank that has run out of samples.
        """
        first = step - step % self.accumulate
        begin = first * self.step_size
        end = min(self.samples, (first + self.accumulate) * self.step_size)
        piece = self.piece(step, rank)
        count: int = piece.stop - piece.start
        return count * self.world_size / (end - begin)


def permutation(samples: int, *, epoch: int, seed: int) -> torch.Tensor:
    """The order of the samples in an epoch: int64, shape (samples,), the same on every rank and machine."""
    generator = torch.Generator().manual_seed(mix_seeds(seed, epoch))
    return torch.randperm(samples, generator=generator)


def mix_seeds(*numbers: int) -> int:
    """One 63-bit seed from several numbers, without the collisions of adding them (seed 0, rank 1; seed 1, rank 0)."""
    import numpy as np

    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))

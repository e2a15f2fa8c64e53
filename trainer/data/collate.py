"""What comes out of torch's DataLoader: each batch with the number of its samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate, default_convert

from trainer.data.moving import count_samples, pin


@dataclass(slots=True)
class Counted:
    """A batch and its samples; None where nothing in a ready batch tells them."""

    count: int | None
    batch: Any

    def pin_memory(self) -> Counted:
        """What DataLoader calls; its own pinning fails at classes that it cannot make anew."""
        return Counted(self.count, pin(self.batch))


class Collating:
    """Collates samples, or converts ready batches, and counts them, which a batch of any kind does not tell.

    Args:
        collate: the user's `collate_fn`; None for torch's own.
        is_ready: what it is given are batches, one at a time.
    """

    def __init__(self, collate: Callable[[Any], Any] | None, *, is_ready: bool) -> None:
        self._collate = collate or (default_convert if is_ready else default_collate)
        self._is_ready = is_ready

    def __call__(self, samples: Any) -> Counted:
        batch = self._collate(samples)
        return Counted(count_samples(batch) if self._is_ready else len(samples), batch)

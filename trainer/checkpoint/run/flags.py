"""Flags of all ranks, added up after the same update, so that all ranks take the same decision."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from trainer.strategies.base import Strategy

_EVERY_S = 0.5
_AT_MOST_UPDATES = 128


class FlagReduction:
    """Adds up the ranks' flags about twice a second, as an all-reduce after each update would cost too much.

    Rank 0's clock tells after how many updates the next one is due. All ranks count updates alike, so that their
    calls match.
    """

    def __init__(self, strategy: Strategy, update: int) -> None:
        self._strategy = strategy
        self._at, self._next, self._then = update, update + 1, time.monotonic()

    def is_due(self, update: int) -> bool:
        """Return whether `add_up` has to be called after this update, the same on every rank."""
        return update >= self._next

    def add_up(self, update: int, flags: Sequence[bool]) -> list[int]:
        """Return on how many ranks each flag is set. Collective."""
        world, now = self._strategy.world, time.monotonic()
        # Without an update in between, the time tells nothing of theirs.
        each = (now - self._then) / (update - self._at) if update > self._at else _EVERY_S
        until_next = min(max(int(_EVERY_S / max(each, 1e-6)), 1), _AT_MOST_UPDATES)
        own = [*map(float, flags), until_next if world.is_root else 0.0]
        if world.size > 1:
            own = self._strategy.all_reduce(torch.tensor(own, dtype=torch.float64, device=world.device)).tolist()
        *counts, until_next = map(round, own)
        self._at, self._next, self._then = update, update + until_next, now
        return counts

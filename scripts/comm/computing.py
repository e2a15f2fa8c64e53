"""Computing between two all-reduces, as a training step does: it takes a core, for which other ranks may wait."""

from __future__ import annotations

import time

import torch

_SIDE = 64
"""Of the matrices: a product takes less than a hundredth of a step, and fits into a core's cache."""


def compute(seconds: float) -> None:
    """Multiply matrices until this thread has had a core for so many seconds."""
    left, result = torch.ones(_SIDE, _SIDE), torch.empty(_SIDE, _SIDE)
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        torch.mm(left, left, out=result)

"""What a rank's Python stack tells: the collective that the rank waits in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple


class Frame(NamedTuple):
    """A function that is being called. A stack has the innermost first."""

    path: str
    line: int
    name: str

    def __str__(self) -> str:
        return f'File "{self.path}", line {self.line}, in {self.name}'


_BACKWARD = re.compile(r"/torch/autograd/graph\.py$")
_DDP = re.compile(r"/torch/nn/parallel/distributed\.py$")
_FULLY_SHARD = re.compile(r"/torch/distributed/fsdp/")
_TORCH = re.compile(r"/torch/distributed/(?!c10d_logger\.py$)")  # whose decorator is around most functions
_HOROVOD = re.compile(r"/horovod/torch/")
_SYNC_BATCH_NORM = re.compile(r"/torch/nn/modules/_functions\.py$|/horovod/torch/sync_batch_norm\.py$")
# In the innermost line of a rank that waits. Other files of torch.distributed compute and write as well.
_WAITS = re.compile(
    rf"{_DDP.pattern}|{_BACKWARD.pattern}|{_FULLY_SHARD.pattern}|{_HOROVOD.pattern}"
    r"|/torch/distributed/(distributed_c10d|_functional_collectives)\.py$"
)
# A differentiable collective calls itself through autograd.
_LIBRARIES = re.compile(rf"{_DDP.pattern}|/torch/distributed/|{_HOROVOD.pattern}|/torch/autograd/function\.py$")


def is_in_backward(stack: Sequence[Frame]) -> bool:
    """Return whether autograd was called last: it computes, or waits for its threads, one for each GPU."""
    return bool(stack) and bool(_BACKWARD.search(stack[0].path))


def collective_of(stack: Sequence[Frame]) -> str:
    """Return the name of the collective that a rank with this stack waits in; "" where it waits in none.

    It is the outermost function of the collective's library, which is the one that the user has called.
    """
    if not stack or not _WAITS.search(stack[0].path):
        return ""
    inner = list(takewhile(lambda frame: _LIBRARIES.search(frame.path), stack))
    for frame in stack[: len(inner) + 1]:
        if _SYNC_BATCH_NORM.search(frame.path):
            return f"SyncBatchNorm's {frame.name} pass"
    if _any(_DDP, inner):
        is_forward = any(frame.name in ("forward", "_pre_forward") for frame in inner)
        return "DDP's forward pass" if is_forward else "gradients"
    if _any(_FULLY_SHARD, inner):
        return "gradients" if _any(_BACKWARD, stack) else "fully_shard's forward pass"
    for library, pattern in (("horovod.torch", _HOROVOD), ("torch.distributed", _TORCH)):
        if names := [frame.name for frame in inner if pattern.search(frame.path)]:
            return f"{library}.{names[-1]}"
    return "gradients"


def _any(pattern: re.Pattern[str], stack: Sequence[Frame]) -> bool:
    return any(pattern.search(frame.path) for frame in stack)

"""What a rank's stack tells: whether it waits for others in a collective that notes nothing, and in which one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

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

Call = tuple[str, str]
"""File and name of a function that is being called."""


def waits_for(calls: Sequence[Call]) -> str:
    """Return what a rank with this stack waits for; "" where it does not.

    A collective has the name of the outermost function of its library, which is the one that the user has called.

    Args:
        calls: the innermost first.
    """
    if not calls or not _WAITS.search(calls[0][0]):
        return ""
    inner = list(takewhile(lambda call: _LIBRARIES.search(call[0]), calls))
    around = calls[len(inner) : len(inner) + 1]
    for path, name in (*inner, *around):
        if _SYNC_BATCH_NORM.search(path):
            return f"SyncBatchNorm's {name} pass"
    if _any(_DDP, inner):
        return "DDP's forward pass" if any(name in ("forward", "_pre_forward") for _, name in inner) else "gradients"
    if _any(_FULLY_SHARD, inner):
        return "gradients" if _any(_BACKWARD, calls) else "fully_shard's forward pass"
    for library, pattern in (("horovod.torch", _HOROVOD), ("torch.distributed", _TORCH)):
        if names := [name for path, name in inner if pattern.search(path)]:
            return f"{library}.{names[-1]}"
    return "gradients"


def _any(pattern: re.Pattern[str], calls: Sequence[Call]) -> bool:
    return any(pattern.search(path) for path, _ in calls)

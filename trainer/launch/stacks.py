"""What the innermost line of a rank's stack tells: whether it waits for others in a collective that notes nothing."""

from __future__ import annotations

import re

# DDP's own collectives, and those of the user's.
_WAITS = (
    (re.compile(r"/torch/nn/parallel/distributed\.py$|/torch/autograd/graph\.py$"), "gradients"),
    (re.compile(r"/torch/distributed/((distributed_c10d|_functional_collectives)\.py$|fsdp/)"), "torch.distributed"),
    (re.compile(r"/horovod/torch/"), "Horovod"),
)


def waits_for(path: str) -> str:
    """Return what a rank waits for while the innermost line of its stack is in this file; "" where it does not."""
    return next((what for pattern, what in _WAITS if pattern.search(path)), "")

"""Values that one rank sends another: their tensors come to the other rank's device, as a reduction's do.

Pickled as it is, a tensor of a GPU would be on the sender's there, which other ranks on the host compute on, and which
another host may not have.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from torch import Tensor, nn

from trainer.cluster.world import World


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            return NotImplemented
        is_parameter = isinstance(value, nn.Parameter)
        return _arrived, (value.detach().cpu(), value.device.type, value.requires_grad, is_parameter)


def _arrived(tensor: Tensor, kind: str, requires_grad: bool, is_parameter: bool) -> Tensor:
    here = tensor.to(kind)  # joining the job has made this rank's the current one of its kind
    return nn.Parameter(here, requires_grad) if is_parameter else here.requires_grad_(requires_grad)


def packed(value: Any, world: World) -> Any:
    """Return what stands for a value on its way to other ranks: the value itself where all are on CPUs."""
    if world.size == 1 or world.device.type == "cpu":
        return value
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpacked(sent: Any, world: World) -> Any:
    """Return the value that `packed` was given on another rank."""
    if world.size == 1 or world.device.type == "cpu":
        return sent
    return pickle.loads(sent)  # noqa: S301 (sent inside the job only)

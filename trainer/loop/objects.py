"""Pickle values so that their GPU tensors arrive on the receiving rank's GPU.

Plain pickling would put a tensor on the GPU with the sender's number, which belongs to another rank or may not exist on
the receiver's host.
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
    here = tensor.to(kind)  # joining the job has made this rank's device the current device
    return nn.Parameter(here, requires_grad) if is_parameter else here.requires_grad_(requires_grad)


def packed(value: Any, world: World) -> Any:
    """Return what is sent for a value: the value itself if the ranks are on CPUs."""
    if world.size == 1 or world.device.type == "cpu":
        return value
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpacked(sent: Any, world: World) -> Any:
    """Return the value that another rank gave to `packed`."""
    if world.size == 1 or world.device.type == "cpu":
        return sent
    return pickle.loads(sent)  # noqa: S301 (sent inside the job only)

"""Values that one rank sends another: their tensors come to the other rank's device, as a reduction's do.

Pickled as it is, a tensor of a GPU would be on the sender's there, which other ranks on the host compute on, and which
another host may not have.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return _on_device_of_this_rank, (value.detach().cpu(), value.device.type)
        return NotImplemented


def _on_device_of_this_rank(tensor: Tensor, kind: str) -> Tensor:
    return tensor.to(kind)  # joining the job has made it the current one of its kind


def packed(value: Any, device: torch.device) -> Any:
    """Return what stands for a value on its way from a rank with this device: the value itself where it is a CPU."""
    if device.type == "cpu":
        return value
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpacked(sent: Any, device: torch.device) -> Any:
    """Return the value that `packed` was given on a rank whose device is of the same kind."""
    return sent if device.type == "cpu" else pickle.loads(sent)  # noqa: S301 (sent inside the job only)

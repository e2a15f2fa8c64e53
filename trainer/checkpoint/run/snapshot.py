"""Snapshots: private copies of a training's state, so that the training can go on while they are written."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.errors import TrainerError
from trainer.models.sharded import TensorPath, gather, is_sharded, local_part

# What torch.load takes with weights_only=True, besides tensors and containers.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Snapshot:
    """A copy of a state, whose memory the next copy uses again: new memory would make it several times slower.

    GPU tensors are copied into pinned memory, all of them at once.

    Args:
        keeps_parts: of sharded tensors only this rank's part is copied, into `parts`; the copy of the state has a
            tensor without values in its place. Else they are gathered, which is collective.
    """

    def __init__(self, *, keeps_parts: bool = False) -> None:
        self._buffers: dict[TensorPath, Tensor] = {}
        self._keeps_parts = keeps_parts
        self.state: dict[str, Any] = {}
        """What `copy` has returned last."""
        self.parts: dict[TensorPath, dict[str, Any]] = {}
        """This rank's parts of it, for a file; see `state_files.SavedParts`."""

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state with copies of its tensors, in host memory. The next call overwrites them.

        Raises:
            TrainerError: a value is of a type that cannot be loaded again as data.
        """
        self.parts = {}
        # Tensors that share memory, such as tied weights, share it in the snapshot as well.
        copied: dict[tuple[Any, ...], Tensor] = {}
        self.state = self._copy(state, (), copied)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return self.state

    def _copy(self, value: Any, path: TensorPath, copied: dict[tuple[Any, ...], Tensor]) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value.detach(), path, copied)
        if isinstance(value, Mapping):
            # A copy of a module's state has the versions of its modules as an attribute.
            result: dict[Any, Any] = copy.copy(value) if type(value) is OrderedDict else {}
            result.update((key, self._copy(part, (*path, key), copied)) for key, part in value.items())
            return result
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            items = [self._copy(part, (*path, number), copied) for number, part in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, set | frozenset):
            return {self._copy(part, path, copied) for part in value}
        if isinstance(value, np.generic):  # a learning rate that NumPy has computed
            return value.item()
        if type(value) in _PLAIN:
            return value
        raise TrainerError(
            f"{'.'.join(map(str, path))} of the checkpoint's state is a {type(value).__name__}, which cannot be loaded "
            "again as data; valid are tensors, numbers, text, and lists and dicts of them"
        )

    def _copy_tensor(self, tensor: Tensor, path: TensorPath, copied: dict[tuple[Any, ...], Tensor]) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor.cpu().clone()
        if is_sharded(tensor) and self._keeps_parts:
            return self._copy_part(tensor, path)
        if is_sharded(tensor):
            # One whole tensor at a time is on the device. The next one may lie where it lay, so the key would not do.
            return self._copy_whole(gather(tensor), path)
        key = (tensor.device.type, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in copied:
            return copied[key]
        copied[key] = self._copy_whole(tensor, path)
        return copied[key]

    def _copy_part(self, tensor: Tensor, path: TensorPath) -> Tensor:
        if (part := local_part(tensor)) is not None:
            self.parts[path] = {"offset": part.offset, "values": self._copy_whole(part.values, path)}
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def _copy_whole(self, tensor: Tensor, path: TensorPath) -> Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._buffers[path] = buffer
        buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        return buffer

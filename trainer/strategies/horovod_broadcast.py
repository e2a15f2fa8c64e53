"""Broadcasts over Horovod, in pieces: MPI counts the bytes of a message in 31 bits, and Gloo's sockets take as many."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 2**30
_SMALL_BYTES = 2**16


def broadcast_tensors(hvd: Any, tensors: Iterable[Tensor], root: int = 0) -> None:
    """Overwrite each of `tensors` with rank `root`'s, in place."""
    # As bytes, because Horovod supports neither bool nor bfloat16; contiguous, because it requires that.
    pairs = [(tensor, tensor.contiguous()) for tensor in tensors]
    # All are submitted before the first is waited for, so that Horovod negotiates them together.
    handles = [
        hvd.broadcast_async_(piece, root_rank=root, name=f"trainer.tensor.{number}.{part}")
        for number, (_, whole) in enumerate(pairs)
        for part, piece in enumerate(whole.view(-1).view(torch.uint8).split(PIECE_BYTES))
    ]
    for handle in handles:
        hvd.synchronize(handle)
    for tensor, whole in pairs:
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)


def broadcast_object(hvd: Any, value: Any, root: int) -> Any:
    """Return rank `root`'s value on every rank."""
    data = _pickled(value) if hvd.rank() == root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(data)])
    broadcast_tensors(hvd, [length], root)
    if hvd.rank() != root:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_tensors(hvd, [data], root)
    return value if hvd.rank() == root else _unpickled(data)


def all_gather_object(hvd: Any, value: Any) -> list[Any]:
    """Return every rank's value, in the order of the ranks. One all-gather is enough where no value is large."""
    data = _pickled(value)
    length = torch.tensor([len(data)]).view(torch.uint8)
    small = hvd.allgather(torch.cat([length, data[:_SMALL_BYTES]]), name="trainer.objects")
    lengths, parts = [], []
    while len(small):
        lengths.append(int.from_bytes(small[: len(length)].numpy().tobytes(), sys.byteorder))
        parts.append(small[len(length) :][: min(lengths[-1], _SMALL_BYTES)])
        small = small[len(length) + len(parts[-1]) :]
    if sum(lengths) > PIECE_BYTES:
        return [broadcast_object(hvd, value, root) for root in range(len(lengths))]
    if max(lengths) > _SMALL_BYTES:
        parts = hvd.allgather(data, name="trainer.large_objects").split(lengths)
    return [_unpickled(part) for part in parts]


def _pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(data: Tensor) -> Any:
    return pickle.loads(data.numpy().data)  # noqa: S301 (inside the job only)

"""Gradient synchronization by a ring all-reduce over MPI's point-to-point calls; docs/strategies.md has the drawing.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (JPDC 2009). The tensor is
divided into one chunk per rank, and each rank communicates with its two neighbours only. In the scatter-reduce, a rank
that receives a chunk adds its own values and passes the sum on; after N - 1 steps each rank has one chunk that is the
sum over all ranks. In the all-gather, the finished chunks go around once more. In each of the 2·(N - 1) steps a rank
sends one chunk of K/N bytes: 2·K·(N - 1)/N in all, and no algorithm sends less.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from examples.strategies.summing import SummingStrategy
from trainer.cluster.mpi import import_mpi
from trainer.cluster.world import World
from trainer.errors import TrainerError
from trainer.tuning import tune

SEGMENT_BYTES = 1024 * 1024
"""Chunks are sent in segments of this size, so that one is added up while the next arrives."""
_CHUNK, _GOODBYE = 0, 1  # tags
_LAST_MESSAGE_TIMEOUT_S = 5.0


class Ring:
    """All-reduce over a communicator of mpi4py.

    Args:
        comm: used for nothing else, so that no other message gets in between.
    """

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, comm
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._left, self._right = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        self._scratch = torch.empty(0, dtype=torch.uint8)
        # For MPI a rank that has ended is still there, so a rank sends a message when it leaves.
        self._goodbye: Any = comm.Irecv([bytearray(1), MPI.BYTE], self._left, _GOODBYE) if self._size > 1 else None
        self._left_is_gone = False
        self.bytes_sent = 0
        """Bytes that this rank has sent so far. Over all ranks an all-reduce of K bytes adds exactly 2·K·(N - 1)."""

    def all_reduce(self, flat: Tensor) -> None:
        """Sum `flat` over all ranks, in place; all ranks end with the same bits.

        Args:
            flat: one-dimensional, contiguous, on the CPU; of any length, divisible by N or not.

        Raises:
            TrainerError: the left neighbour has ended.
        """
        rank, size = self._rank, self._size
        cuts = [flat.numel() * part // size for part in range(size + 1)]
        chunks = list(pairwise(cuts))
        # As bytes, because MPI has no bfloat16.
        raw = flat.view(torch.uint8).numpy()
        for step in range(size - 1):  # scatter-reduce
            self._pass_on(flat, raw, chunks[(rank - step) % size], chunks[(rank - step - 1) % size], add=True)
        for step in range(size - 1):  # all-gather
            self._pass_on(flat, raw, chunks[(rank - step + 1) % size], chunks[(rank - step) % size], add=False)

    def _pass_on(self, flat: Tensor, raw: Any, outgoing: tuple[int, int], chunk: tuple[int, int], *, add: bool) -> None:
        """Send one chunk to the right; receive another from the left, and add it or write it in place.

        Args:
            raw: `flat`, as bytes.
        """
        width = flat.element_size()
        length = chunk[1] - chunk[0]
        if add and self._scratch.numel() < length * width:  # kept, because new memory costs as much as the sum
            self._scratch = torch.empty(length * width, dtype=torch.uint8)
        target = self._scratch.numpy() if add else raw[chunk[0] * width : chunk[1] * width]
        # Everything is posted at once; MPI keeps the order of messages between two ranks.
        pieces = list(_segments(0, length, width))
        receiving = [self._comm.Irecv(target[b * width : e * width], self._left, _CHUNK) for b, e in pieces]
        sending = [
            self._comm.Isend(raw[b * width : e * width], self._right, _CHUNK) for b, e in _segments(*outgoing, width)
        ]
        for request, (begin, end) in zip(receiving, pieces, strict=True):
            self._wait(request)
            if add:
                arrived = self._scratch[begin * width : end * width].view(flat.dtype)
                flat[chunk[0] + begin : chunk[0] + end].add_(arrived)
        self._mpi.Request.Waitall(sending)
        self.bytes_sent += (outgoing[1] - outgoing[0]) * width

    def _wait(self, request: Any) -> None:
        if not self._left_is_gone and self._mpi.Request.Waitany([request, self._goodbye]) == 0:
            return
        self._left_is_gone = True
        deadline = time.monotonic() + _LAST_MESSAGE_TIMEOUT_S
        while not request.Test():
            if time.monotonic() > deadline:
                raise TrainerError(f"rank {self._left} has ended, and this rank still waits for its gradients")
            time.sleep(0.01)

    def leave(self) -> None:
        """Tell the right neighbour that no further message will come."""
        if self._goodbye is not None:
            self._comm.Isend([b"x", self._mpi.BYTE], self._right, _GOODBYE)
            if not self._left_is_gone:
                self._goodbye.Cancel()
            self._goodbye = None


def _segments(begin: int, end: int, width: int) -> Iterator[tuple[int, int]]:
    """Divide a range of elements of `width` bytes each into segments."""
    step = SEGMENT_BYTES // width
    return ((at, min(at + step, end)) for at in range(begin, end, step))


class RingStrategy(SummingStrategy):
    """Bucketed gradients, all-reduced by `Ring`.

    Raises:
        ConfigError: mpi4py is not installed, or this process was not started by MPI.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        # Open MPI reads these when it starts, which importing mpi4py makes it do.
        self.tuning = tune(world)
        mpi = import_mpi(world, for_what="strategy 'ring'")
        self.may_overlap = mpi.Query_thread() == mpi.THREAD_MULTIPLE
        self._ring = Ring(mpi.COMM_WORLD.Dup())
        self.description = f"ring all-reduce over MPI, {world}"

    def sum_gradients(self, flat: Tensor) -> None:
        self._ring.all_reduce(flat)

    @property
    def bytes_sent(self) -> int:
        """Bytes of gradients that this rank has sent since the strategy was made."""
        return self._ring.bytes_sent

    def close(self) -> None:
        super().close()
        self._ring.leave()

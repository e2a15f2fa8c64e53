"""Two ranks of one process, for tests of what ranks do with one another: threads that add up tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from trainer.strategies.compress.flat import Transport

_ResultT = TypeVar("_ResultT")
_TIMEOUT_S = 20.0


class Threads:
    """Ranks as threads. `messages` are the names and sizes of what rank 0 has sent."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.messages: list[tuple[str, int]] = []
        self._given: list[Tensor] = [torch.empty(0)] * ranks
        self._barrier = threading.Barrier(ranks, timeout=_TIMEOUT_S)

    def transport(self, rank: int) -> Transport:
        """Return what a rank sends by."""

        def send(flat: Tensor, name: str) -> Tensor:
            if rank == 0:
                self.messages.append((name, flat.numel()))
            self._given[rank] = flat.clone()
            self._barrier.wait()
            total = torch.stack(self._given).sum(0)
            self._barrier.wait()
            return flat.copy_(total)

        return Transport(
            send=send,
            start=lambda flat, name: partial(send, flat, name),
            all_reduce=lambda tensor: send(tensor, "other"),
            ranks=self.ranks,
        )

    def run(self, job: Callable[[int, Transport], _ResultT]) -> list[_ResultT]:
        """Return what the job returns on each rank."""
        with ThreadPoolExecutor(self.ranks) as pool:
            started = [pool.submit(job, rank, self.transport(rank)) for rank in range(self.ranks)]
            return [one.result() for one in started]

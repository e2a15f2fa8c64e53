"""Two ranks of one process, for tests of what ranks do with one another: threads that add up tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer import World
from trainer.strategies.base import Strategy

_ResultT = TypeVar("_ResultT")
_TIMEOUT_S = 20.0


class Threads:
    """Ranks as threads. `messages` are the names and sizes of what rank 0 has sent, `types` those of its numbers."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.messages: list[tuple[str, int]] = []
        self.types: dict[str, torch.dtype] = {}
        self._given: list[Any] = [torch.empty(0)] * ranks
        self._barrier = threading.Barrier(ranks, timeout=_TIMEOUT_S)

    def strategy(self, rank: int) -> Any:
        """Return what a rank sends by."""

        def send(flat: Tensor, name: str) -> Tensor:
            if rank == 0:
                plain = name.rpartition(".")[0] or name  # without the model's number
                self.messages.append((plain, flat.numel()))
                self.types[plain] = flat.dtype
            self._given[rank] = flat.clone()
            self._barrier.wait()
            total = torch.stack(self._given).sum(0)
            self._barrier.wait()
            return flat.copy_(total)

        def all_gather(value: Any) -> list[Any]:
            self._given[rank] = value
            self._barrier.wait()
            gathered = [*self._given]
            self._barrier.wait()
            return gathered

        return SimpleNamespace(
            all_gather_object=all_gather,
            start_gradients=lambda flat, name: partial(send, flat, name),
            all_reduce=lambda tensor: send(tensor, "other"),
            world=World(rank=rank, size=self.ranks),
        )

    def run(self, job: Callable[[int, Strategy], _ResultT]) -> list[_ResultT]:
        """Return what the job returns on each rank."""
        with ThreadPoolExecutor(self.ranks) as pool:
            started = [pool.submit(job, rank, self.strategy(rank)) for rank in range(self.ranks)]
            return [future.result() for future in started]

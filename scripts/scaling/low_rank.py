"""What compression powersgd sends and computes for a network, for the advice of scaling_test.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.cluster.world import World
from trainer.strategies.compress.power_sgd import PowerSGDSynchronizer

RANK = 8
"""Of the approximation that is advised: the smallest one that kept the accuracy in docs/measured-strategies.md."""
_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """An update under compression powersgd."""

    messages: tuple[int, ...]
    """Bytes of each all-reduce, one after the other."""
    seconds: float
    """Of what a rank computes in addition, on cores of its own."""


def measure_low_rank(shapes: Sequence[Sequence[int]], threads: int, device: str) -> LowRank:
    """Approximate random gradients on one rank, and note the messages that it would send.

    Args:
        shapes: of the gradients.
        threads: PyTorch's.
        device: cpu or cuda.
    """
    parameters = [
        (str(number), nn.Parameter(torch.zeros(tuple(shape), device=device))) for number, shape in enumerate(shapes)
    ]
    sent: list[int] = []

    def send(flat: Tensor, _: str) -> Callable[[], object]:
        sent.append(flat.nbytes)
        return lambda: None

    strategy: Any = SimpleNamespace(world=World(), start_gradients=send)  # all that is asked of one
    synchronizer = PowerSGDSynchronizer(parameters, strategy, rank=RANK)
    own_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seconds = [_time_update(synchronizer, parameters) for _ in range(_REPEATS)]
    finally:
        torch.set_num_threads(own_threads)
    return LowRank(messages=tuple(sent[: len(sent) // _REPEATS]), seconds=median(seconds))


def _time_update(synchronizer: PowerSGDSynchronizer, parameters: Sequence[tuple[str, nn.Parameter]]) -> float:
    for _, parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    _wait(parameters)
    started = time.perf_counter()
    synchronizer.complete()
    _wait(parameters)
    return time.perf_counter() - started


def _wait(parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    if any(parameter.is_cuda for _, parameter in parameters):
        torch.cuda.synchronize()

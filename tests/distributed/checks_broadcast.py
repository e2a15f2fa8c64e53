"""Broadcasts and gathers of any types and sizes, run on every rank of one job; see `jobs`."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.strategies.base import Strategy


def tensors_of(rank: int, device: torch.device) -> list[Tensor]:
    """Return tensors of the kinds that a model has, with values that differ from rank to rank."""
    ordered = torch.arange(12, dtype=torch.float32, device=device) + 100 * rank
    return [
        ordered,
        ordered.view(3, 4).t(),
        ordered.to(torch.bfloat16).view(2, 6),
        torch.tensor([rank == 0, rank != 0], device=device),
        torch.tensor(rank + 7, device=device),
        torch.tensor([rank + 7, 3], dtype=torch.int16, device=device),
        torch.tensor([rank + 0.5], device=device).to(torch.float8_e4m3fn),
        torch.empty(0, device=device),
        (ordered.view(3, 4) + 0.5).to(memory_format=torch.contiguous_format)[:, 1:3],
    ]


def check_every_tensor_becomes_rank_0s(strategy: Strategy) -> None:
    rank, device = strategy.world.rank, strategy.world.device
    own = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors_of(rank, device)]
    own[-1] = torch.zeros(3, 4, device=device)[:, 1:3].copy_(own[-1])
    strategy.broadcast_tensors(own)
    for found, expected in zip(own, tensors_of(0, device), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def check_values_of_any_size_are_gathered(strategy: Strategy) -> None:
    rank, size = strategy.world.rank, strategy.world.size
    for lengths in ([0] * size, range(30, 70), [10, *[500] * size], [500, *[10] * size]):
        expected = [["x"] * length for length in lengths][:size]
        assert strategy.all_gather_object(expected[rank]) == expected

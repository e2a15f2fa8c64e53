"""Which gradients Horovod sends together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.strategies.buckets import BUCKET_BYTES
from trainer.strategies.horovod import gradient_groups

FULL = BUCKET_BYTES // 4


def floats(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.empty(size, device="meta")) for size in sizes]


@pytest.mark.parametrize("over_nccl", [False, True])
def test_a_small_model_sends_its_gradients_together(over_nccl: bool) -> None:
    first, second, third = floats(10, FULL - 30, 20)
    assert gradient_groups([first, second, third], over_nccl=over_nccl) == [[2, 1, 0]]


def test_a_larger_one_sends_buckets_between_cpus_and_what_is_ready_between_gpus() -> None:
    first, second, third = floats(10, FULL, 20)
    assert gradient_groups([first, second, third], over_nccl=False) == [[2, 1], [0]]
    assert gradient_groups([first, second, third], over_nccl=True) is None


def test_gradients_of_another_type_are_sent_by_themselves() -> None:
    (single,), double = floats(10), nn.Parameter(torch.empty(10, dtype=torch.float64, device="meta"))
    assert gradient_groups([single, double], over_nccl=False) == [[1], [0]]

"""Values between ranks whose tensors are on GPUs; PyTorch's device "meta" stands in for those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.loop import objects
from trainer.loop.objects import packed, unpacked

ARRIVED: list[str] = []


def arrive(tensor: Tensor, kind: str) -> Tensor:
    ARRIVED.append(kind)
    return tensor + 1


def test_on_cpus_a_value_goes_as_it_is() -> None:
    value = {"a": torch.ones(2)}
    assert unpacked(packed(value, torch.device("cpu")), torch.device("cpu")) is value


def test_tensors_of_a_device_come_to_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: torch.zeros(tensor.shape))
    monkeypatch.setattr(objects, "_on_device_of_this_rank", arrive)
    device = torch.device("meta")
    value: Any = {"scores": [torch.empty(2, device=device)], "kept": torch.full((2,), 5.0), "step": 3}
    received = unpacked(packed(value, device), device)
    assert ARRIVED == ["meta"]
    assert received["scores"][0].tolist() == [1.0, 1.0]
    assert (received["kept"].tolist(), received["step"]) == ([5.0, 5.0], 3)

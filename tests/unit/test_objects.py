"""Values between ranks whose tensors are on GPUs; PyTorch's device "meta" stands in for those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer import World
from trainer.loop.objects import packed, unpacked

META = torch.device("meta")


@pytest.mark.parametrize("world", [World(size=2), World(device=META)])
def test_on_cpus_and_alone_a_value_goes_as_it_is(world: World) -> None:
    value = {"a": torch.ones(2)}
    assert unpacked(packed(value, world), world) is value


def test_tensors_of_a_device_come_to_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    world, moved = World(size=2, device=META), list[Any]()

    def to(tensor: Tensor, kind: str) -> Tensor:
        moved.append(kind)
        return tensor + 1

    monkeypatch.setattr(Tensor, "cpu", lambda tensor: torch.zeros(tensor.shape))
    monkeypatch.setattr(Tensor, "to", to)
    latent = torch.empty(3, device=META, requires_grad=True)
    value: Any = {"scores": [torch.empty(2, device=META)], "latent": latent, "kept": torch.full((2,), 5.0), "step": 3}
    value["layer"] = nn.Linear(1, 1, bias=False, device=META)
    received = unpacked(packed(value, world), world)
    assert moved == ["meta"] * 3
    assert received["scores"][0].tolist() == [1.0, 1.0]
    assert (received["latent"].is_leaf, received["latent"].requires_grad) == (True, True)
    assert [type(parameter) for parameter in received["layer"].parameters()] == [nn.Parameter]
    assert (received["kept"].tolist(), received["step"]) == ([5.0, 5.0], 3)

"""channels_last: the weights' order, and that of what optimizers and checkpoints keep for them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from trainer import CheckpointConfig, InMemory, Trainer, TrainerConfig
from trainer.models.memory_format import to_channels_last


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


def train(model: nn.Module, epochs: int, folder: Path | None, *, channels_last: bool) -> None:
    data = InMemory(torch.randn(12, 3, 5, 5, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 4)
    config = TrainerConfig(batch_size=4, channels_last=channels_last, decay="none", device="cpu")
    checkpoint = CheckpointConfig(folder=folder) if folder else None
    made = Trainer(
        model, sgd(model), F.cross_entropy, config=config, output=None, progress=False, checkpoint=checkpoint
    )
    made.fit(data, epochs=epochs)


def test_a_fused_optimizer_goes_on_from_a_checkpoint_in_the_other_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten())
    whole, resumed = deepcopy(model), deepcopy(model)
    train(whole, 3, None, channels_last=False)
    train(model, 1, tmp_path / "c", channels_last=False)
    train(resumed, 3, tmp_path / "c", channels_last=True)
    assert not resumed.state_dict()["1.weight"].is_contiguous()
    for name, value in whole.state_dict().items():
        assert torch.allclose(resumed.state_dict()[name], value, atol=1e-5)


def test_what_an_optimizer_has_kept_already_gets_the_weights_order() -> None:
    model = nn.Conv2d(3, 4, 3)
    optimizer = sgd(model)
    model(torch.ones(1, 3, 3, 3)).sum().backward()
    optimizer.step()
    before = optimizer.state[model.weight]["momentum_buffer"].clone()
    to_channels_last(model, optimizer)
    after = optimizer.state[model.weight]["momentum_buffer"]
    assert after.stride() == model.weight.stride() != before.stride()
    assert torch.equal(after, before)

"""From a model and an optimizer to ones that train with all other ranks: what is refused, and on which device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer import ConfigError, TrainerConfig, World, preparation, prepare
from trainer.strategies.single import SingleStrategy

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("gpus", "found", "nccl", "expected", "warning"),
    [
        (0, CPU, False, CPU, ""),
        (1, CUDA, True, CUDA, ""),
        (1, CUDA, False, CPU, "this Horovod was built without NCCL"),
        (1, CPU, True, CPU, "this host has 1 GPU for 2 ranks"),
    ],
)
def test_device_auto_takes_the_cpu_where_the_gpu_cannot_be_used(
    gpus: int,
    found: torch.device,
    nccl: bool,
    expected: torch.device,
    warning: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(preparation, "has_nccl", lambda: nccl)
    world = World(rank=0, size=2, local_rank=0, local_size=2, device=found, launcher="mpirun")
    assert preparation._with_usable_device("auto", world, TrainerConfig()).device == expected
    printed = capsys.readouterr().err
    assert warning in printed
    assert bool(warning) == bool(printed)


def test_a_device_that_was_asked_for_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(preparation, "has_nccl", lambda: False)
    world = World(device=CUDA, launcher="mpirun")
    assert preparation._with_usable_device("auto", world, TrainerConfig(device="cuda")) is world


def test_parameters_outside_the_model_are_refused() -> None:
    model, temperature = nn.Linear(2, 1), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    with pytest.raises(ConfigError, match="holds 1 parameters that the model does not"):
        prepare(model, optimizer, strategy=SingleStrategy(World()))

"""Joining a job: on which device."""

from __future__ import annotations

import pytest
import torch

from trainer import World, preparation
from trainer.config import RunConfig

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
    assert preparation._with_usable_device("auto", world, RunConfig()).device == expected
    printed = capsys.readouterr().err
    assert warning in printed
    assert bool(warning) == bool(printed)


def test_a_device_that_was_asked_for_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(preparation, "has_nccl", lambda: False)
    world = World(device=CUDA, launcher="mpirun")
    assert preparation._with_usable_device("auto", world, RunConfig(device="cuda")) is world

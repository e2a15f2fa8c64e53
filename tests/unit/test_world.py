"""Who trains here, and on which device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.cluster.environment import Launch
from trainer.cluster.world import World, current_world
from trainer.errors import ConfigError


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets PyTorch report as many GPUs as the test asks for."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)


def on_local_rank(local_rank: int, local_size: int = 4) -> Launch:
    return Launch(launcher="mpirun", rank=local_rank, size=local_size, local_rank=local_rank, local_size=local_size)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"rank": 2, "size": 2}, "^rank is 2; with 2 processes it must be 0 to 1$"),
        ({"rank": -1}, "^rank is -1"),
        ({"size": 4, "local_rank": 2, "local_size": 2}, "^local rank is 2; with 2 processes it must be 0 to 1$"),
        ({"size": 0}, "^rank is 0; with 0 processes"),
    ],
)
def test_a_rank_outside_its_world_is_refused(places: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        World(**places)


@pytest.mark.parametrize(
    ("gpus", "device", "local_rank", "expected"),
    [
        (0, "auto", 0, "cpu"),
        (0, "cpu", 0, "cpu"),
        (4, "cpu", 3, "cpu"),
        (4, "auto", 3, "cuda:3"),
        (4, "cuda", 0, "cuda:0"),
        # Fewer GPUs than ranks: all of them, and not only those without one, take the CPU.
        (2, "auto", 1, "cpu"),
        (1, "auto", 0, "cpu"),
    ],
    indirect=["gpus"],
)
@pytest.mark.usefixtures("gpus")
def test_a_rank_takes_the_gpu_with_its_local_number(device: str, local_rank: int, expected: str) -> None:
    assert current_world(device, on_local_rank(local_rank)).device == torch.device(expected)


@pytest.mark.parametrize("gpus", [1], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_slurm_can_show_each_rank_its_own_gpu_only() -> None:
    launch = Launch(launcher="srun", rank=3, size=4, local_rank=3, local_size=4)
    assert current_world("auto", launch).device == torch.device("cuda:0")


@pytest.mark.parametrize(
    ("gpus", "device", "local_rank", "message"),
    [
        (0, "cuda", 0, "device is 'cuda', but this host shows no GPU"),
        (2, "cuda", 3, "local rank 3 has no GPU: this host shows 2"),
        (2, "tpu", 0, "device is 'tpu'; valid are auto, cpu, cuda"),
        (0, "tpu", 0, "device is 'tpu'; valid are auto, cpu, cuda"),
    ],
    indirect=["gpus"],
)
@pytest.mark.usefixtures("gpus")
def test_a_device_that_cannot_be_had_is_refused(device: str, local_rank: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        current_world(device, on_local_rank(local_rank))

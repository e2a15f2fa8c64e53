"""Ranks that share a GPU: by choice, told, and refused where NCCL is too old for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainer import World
from trainer.cluster import gpus
from trainer.cluster.environment import Launch
from trainer.cluster.world import current_world
from trainer.errors import ConfigError
from trainer.loop.consistency import check_devices
from trainer.strategies.single import SingleStrategy


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what sets the GPUs of this host, NCCL's version, and the choice to share."""

    def make(count: int, version: tuple[int, ...] | None = (2, 30, 7), *, chosen: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(gpus, "nccl_version", lambda: version)
        monkeypatch.delenv(gpus.SHARING, raising=False)
        if chosen:
            monkeypatch.setenv(gpus.SHARING, "1")

    return make


def devices(ranks: int, device: str = "auto") -> list[str]:
    launches = (Launch(launcher="mpirun", rank=r, size=ranks, local_rank=r, local_size=ranks) for r in range(ranks))
    return [str(current_world(device, launch).device) for launch in launches]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_ranks_are_spread_over_the_gpus(host: Callable[..., None], device: str) -> None:
    host(1)
    assert devices(4, device) == ["cuda:0"] * 4
    host(2)
    assert devices(3, device) == ["cuda:0", "cuda:1", "cuda:0"]


def test_without_the_choice_ranks_take_the_cpu_or_are_told_of_it(host: Callable[..., None]) -> None:
    host(1, chosen=False)
    assert devices(2) == ["cpu", "cpu"]
    host(2, chosen=False)
    with pytest.raises(ConfigError, match=r"local rank 2 has no GPU: .*; NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks"):
        devices(3, "cuda")


@pytest.mark.parametrize(
    ("version", "found"), [((2, 29, 4), "this is NCCL 2.29.4"), (None, "this PyTorch has no NCCL")]
)
def test_an_nccl_that_cannot_share_is_refused(
    host: Callable[..., None], version: tuple[int, ...] | None, found: str
) -> None:
    host(1, version)
    message = f"^NCCL_MULTI_RANK_GPU_ENABLE is 1, but {found}, and .* NCCL 2.30 or newer; start at most 1 of these 2"
    with pytest.raises(ConfigError, match=message):
        devices(2)


class OnAGpu(SingleStrategy):
    """One of two ranks on the same GPU."""

    def __init__(self, world: World, *, other_may: bool = True) -> None:
        super().__init__(world)
        self._other_may = other_may

    def all_gather_object(self, value: tuple[object, ...]) -> list[object]:
        return [value, (*value[:2], self._other_may) if isinstance(value[2], bool) else value]


def test_each_of_the_ranks_on_a_gpu_has_to_have_chosen_it(
    host: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.loop.consistency.gpu_id", lambda _: "GPU-0")
    world = World(device=torch.device("cuda", 0))
    host(1)
    check_devices(OnAGpu(world))
    with pytest.raises(ConfigError, match=r"^ranks 0 and 1 share one GPU"):
        check_devices(OnAGpu(world, other_may=False))
    host(1, chosen=False)
    with pytest.raises(ConfigError, match=r"^ranks 0 and 1 share one GPU .*; NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks"):
        check_devices(OnAGpu(world))

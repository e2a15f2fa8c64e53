"""Ranks that share a GPU: by choice, told, and refused where NCCL is too old for it. The check, and its kit."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import check_gpu
import pytest
import torch
from gpu_kit import thin_out

from benchmarks.common import REPORT_PREFIX
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


def elf(sections: dict[str, bytes]) -> bytes:
    """Return a file with these sections, as far as `thin_out` reads it."""
    names = b"\0" + b"\0".join(name.encode() for name in (*sections, ".names")) + b"\0"
    bodies, at, table = b"", 64, b""
    for name, body in {**sections, ".names": names}.items():
        table += struct.pack("<IIQQQQ", names.index(name.encode()), 0, 0, 0, at, len(body)) + bytes(24)
        bodies, at = bodies + body, at + len(body)
    count = len(sections) + 1
    head = bytearray(64)
    struct.pack_into("<Q", head, 0x28, at)
    struct.pack_into("<HHH", head, 0x3A, 64, count, count - 1)
    return bytes(head) + bodies + table


def kernels(*arches: int, padding: int = 0) -> bytes:
    """Return a container with a kernel of 24 bytes for each compute capability."""
    entries = b"".join(
        struct.pack("<HHIQ", 2, 1, 64, 24).ljust(28, b"\0") + struct.pack("<I", arch) + bytes(32) + b"k" * 24
        for arch in arches
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries + bytes(padding)


def test_of_a_library_the_kernels_of_one_kind_of_gpu_are_left() -> None:
    library = elf(
        {
            ".text": b"code",
            ".nv_fatbin": kernels(80, 90, 100, padding=8) + kernels(90),
            "__nv_relfatbin": kernels(90),
            ".debug_info": b"debug",
        }
    )
    left = kernels(90, padding=2 * 88 + 8) + kernels(90)
    assert thin_out(library, 90) == elf(
        {".text": b"code", ".nv_fatbin": left, "__nv_relfatbin": kernels(padding=88), ".debug_info": bytes(5)}
    )


def test_a_stage_that_fails_ends_no_other_and_one_that_no_longer_fits_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = f"print({REPORT_PREFIX!r} + '{{\"ms/step\": %s}}')"
    trials = {"ours": (report % 3.0, 60), "broken": ("raise SystemExit('no room')", 60), "long": ("", 100_000)}
    trials = {check_gpu.HAND: (report % 2.0, 60), **trials}
    stages = [
        check_gpu.Stage("b", "gpt", name, [sys.executable, "-c", code], limit_s)
        for name, (code, limit_s) in trials.items()
    ]
    stages[1:1] = [check_gpu.Stage("b", "gpt", "none", ["no-horovodrun"])]
    stages.append(check_gpu.Stage("b", "gpt", "too old", ["would-fail"], left_out="it needs another PyTorch"))
    monkeypatch.setattr(check_gpu, "stages", lambda *_: stages)
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", "--device", "cpu", "--output", str(tmp_path)])
    assert check_gpu.main() == 1
    text = " ".join((tmp_path / "check-gpu.md").read_text().split())
    assert "ours | 3.000 ms/step | 1.500 |" in text
    assert "exit code 1: no room" in text
    assert "it needs another PyTorch" in text
    outcomes = [one["outcome"] for one in json.loads((tmp_path / "check-gpu.json").read_text())["stages"]]
    assert outcomes == ["ok", "failed", "ok", "failed", "left out", "left out"]

"""Joining a job: on which device, and what is said while the ranks do not come together."""

from __future__ import annotations

import time
from queue import Queue

import pytest
import torch
from torch.torch_version import TorchVersion

from trainer import World
from trainer.config import RunConfig
from trainer.loop import joining
from trainer.watch.heartbeat import LOST_PEER

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
    monkeypatch.setattr(joining, "has_nccl", lambda: nccl)
    world = World(rank=0, size=2, local_rank=0, local_size=2, device=found, launcher="mpirun")
    assert joining._with_usable_device("auto", world, RunConfig()).device == expected
    printed = capsys.readouterr().err
    assert warning in printed
    assert bool(warning) == bool(printed)


def test_the_first_line_is_short_and_the_record_has_what_was_tuned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(joining, "share_machine", lambda *_: {"threads": "1 per rank"})
    joined = joining.join("single", RunConfig(device="cpu"))
    assert joined.tuning["threads"] == "1 per rank"
    assert capsys.readouterr().err == f"trainer: {joined.world}\n"


@pytest.mark.parametrize(
    ("version", "says"),
    [("2.9.1", True), ("2.10.0+cpu", False), ("2.14.1+cu130", False), ("2.15.3", False), ("2.16.0", True)],
)
def test_a_pytorch_that_has_not_passed_all_checks_is_told(
    version: str, says: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    joining.join("single", RunConfig(device="cpu"))
    line = f"trainer: not all checks have passed with PyTorch {version}; they have with 2.10 to 2.15\n"
    assert (line in capsys.readouterr().err) == says


@pytest.mark.parametrize(("rank", "size", "says"), [(0, 2, True), (1, 2, False), (0, 1, False)])
def test_rank_0_says_that_the_ranks_have_not_connected(
    rank: int, size: int, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_UNCONNECTED_S", 0.01)
    told: Queue[str] = Queue()
    monkeypatch.setattr(joining, "print_line", lambda text, _: told.put(text))
    with joining._said_until_connected(World(rank=rank, size=size, device=CPU), "not connected so far"):
        if says:
            assert told.get(timeout=20) == "trainer: not connected so far"
        else:
            time.sleep(0.2)
    assert told.empty()


def test_a_job_whose_ranks_do_not_connect_ends_as_one_that_has_lost_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    told: Queue[tuple[object, ...]] = Queue()
    monkeypatch.setattr(joining, "report_failure", lambda *words: told.put(words[:2]))
    monkeypatch.setattr(joining, "end_process", lambda *words: told.put(words))
    with joining._said_until_connected(World(rank=0, size=2, device=CPU), "not connected so far", end_s=0.01):
        assert told.get(timeout=20) == (LOST_PEER, "given up after 0 s: not connected so far")
        assert told.get(timeout=20) == ("given up after 0 s: not connected so far", 1)

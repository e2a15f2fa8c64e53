"""The variables that joining a group sets, and groups that do not fit the job."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from trainer import ConfigError, World
from trainer.cluster.process_group import join_group

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _made_by_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANKS:
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)


def world(rank: int = 0, device: str = "cpu") -> World:
    return World(rank=rank, size=2, local_rank=rank, local_size=2, launcher="mpirun", device=torch.device(device))


def test_variables_are_set_where_nobody_has() -> None:
    join_group(world())
    assert [os.environ[name] for name in RANKS] == ["0", "2", "0", "2"]


def test_another_jobs_variables_stay_and_are_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    join_group(world())
    assert [os.environ[name] for name in RANKS] == ["", "1", "", ""]
    assert "WORLD_SIZE is 1, and mpirun has started this as rank 0 of 2" in capfd.readouterr().err


def test_the_local_rank_is_left_out_where_it_is_not_the_number_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    join_group(world(rank=1, device="cuda:0"))  # srun may show each rank its own GPU alone
    assert [os.environ[name] for name in RANKS] == ["1", "2", "", ""]


def test_a_group_of_other_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 0 of 2 there; for mpirun it is rank 1 of 2, which must be the same"):
        join_group(world(rank=1))

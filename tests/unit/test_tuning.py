"""What is set for a host: from what it is, and never over what the user set."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from trainer import World
from trainer.tuning import host as host_module
from trainer.tuning import open_mpi, tune
from trainer.tuning.host import host_cores, share_machine, tune_host
from trainer.tuning.open_mpi import tune_open_mpi

CYCLE_TIME, FUSION, IDLE = "HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD", "OMPI_MCA_mpi_yield_when_idle"
SINGLE_COPY, OPAL_PREFIX = "OMPI_MCA_btl_vader_single_copy_mechanism", "OPAL_PREFIX"
PMIX_SECURITY = "PMIX_MCA_psec"
RULES, USE_RULES = "OMPI_MCA_coll_tuned_dynamic_rules_filename", "OMPI_MCA_coll_tuned_use_dynamic_rules"


class Host:
    """A host of the test's own making, and what the tuning did to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.threads: list[int] = []
        self.kept_memory = 0
        self.environment: dict[str, str] = {}
        monkeypatch.setattr(os, "environ", self.environment)
        monkeypatch.setattr(torch, "set_num_threads", self.threads.append)
        monkeypatch.setattr(host_module, "_TAKEN", set())
        monkeypatch.setattr(host_module, "_keep_memory", self._keep_memory)
        monkeypatch.setattr(open_mpi, "single_copy_allowed", lambda: True)
        monkeypatch.setattr(open_mpi, "in_container", lambda: False)
        monkeypatch.setattr(host_module, "take_own_session", lambda: True)
        self.has(cores=8)

    def has(self, *, cores: int, bound_to: int | None = None) -> None:
        for module in (host_module, open_mpi):
            self._monkeypatch.setattr(module, "host_cores", lambda: cores)
        self._monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(bound_to or cores)))
        self._monkeypatch.setattr(torch, "get_num_threads", lambda: bound_to or cores)

    def _keep_memory(self) -> bool:
        self.kept_memory += 1
        return True


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def tune_all(world: World) -> dict[str, str]:
    return tune(world, horovod=True)


def ranks(local_size: int, *, launcher: str = "mpirun", device: str = "cpu") -> World:
    return World(size=local_size, local_size=local_size, launcher=launcher, device=torch.device(device))


@pytest.mark.parametrize(
    ("cores", "local_size", "bound_to", "threads"),
    [(8, 2, None, 4), (8, 3, None, 2), (2, 4, None, 1), (8, 2, 1, 1), (8, 2, 3, 3), (8, 2, 8, 4)],
)
def test_every_rank_takes_its_share_of_the_cores(
    host: Host, cores: int, local_size: int, bound_to: int | None, threads: int
) -> None:
    host.has(cores=cores, bound_to=bound_to)
    chosen = tune_host(ranks(local_size))
    assert host.threads == [threads]
    assert chosen["threads"] == f"{threads} per rank ({local_size} ranks on {cores} cores)"


@pytest.mark.parametrize(
    ("launcher", "omp_num_threads", "threads"),
    [
        ("mpirun", "1", []),
        ("mpirun", "3", []),
        ("torchrun", "3", []),
        # torchrun sets 1 itself where the user said nothing.
        ("torchrun", "1", [4]),
        ("mpirun", "", [4]),
    ],
)
def test_the_users_thread_count_stays(
    host: Host, monkeypatch: pytest.MonkeyPatch, launcher: str, omp_num_threads: str, threads: list[int]
) -> None:
    host.environment["OMP_NUM_THREADS"] = omp_num_threads
    monkeypatch.setattr(torch, "get_num_threads", lambda: int(omp_num_threads or 8))
    tune_host(ranks(2, launcher=launcher))
    assert host.threads == threads


def test_ranks_in_several_containers_share_their_machines_cores(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(host_module, "machine_id", lambda: "this")
    one_of_two_hosts = World(size=4, local_size=2, launcher="mpirun")
    assert share_machine(one_of_two_hosts, ["this", "this", "other", "other"]) == {}
    assert host.threads == []
    assert "threads" in share_machine(one_of_two_hosts, ["this"] * 4)
    assert host.threads == [2]
    host.environment["OMP_NUM_THREADS"] = "8"
    assert share_machine(one_of_two_hosts, ["this"] * 4) == {}


@pytest.mark.parametrize(("local_size", "yields"), [(1, False), (4, False), (5, True), (8, True), (16, True)])
def test_ranks_of_several_hosts_yield_only_where_their_threads_outnumber_the_cores(
    host: Host, local_size: int, yields: bool
) -> None:
    # Every rank has two threads, and there are eight cores.
    chosen = tune_all(World(size=2 * local_size, local_size=local_size, launcher="mpirun"))
    assert host.environment.get(IDLE) == ("1" if yields else None)
    assert ("idle" in chosen) == yields


def test_horovods_cycle_is_shortened_where_a_rank_waits_for_it(host: Host) -> None:
    assert "cycle time" not in tune_all(ranks(1))
    assert CYCLE_TIME not in host.environment
    assert "0.01 ms" in tune_all(ranks(2))["cycle time"]
    assert host.environment[CYCLE_TIME] == "0.01"


@pytest.mark.parametrize(
    ("world", "copies"),
    [(ranks(2), True), (World(size=4, local_size=2, launcher="mpirun"), False), (ranks(2, device="cuda:0"), False)],
    ids=["one host", "two hosts", "gpus"],
)
def test_between_ranks_of_one_host_large_gradients_are_not_copied_together(
    host: Host, world: World, copies: bool
) -> None:
    assert ("fusion" in tune_all(world)) == copies
    assert host.environment.get(FUSION) == ("4194304" if copies else None)


@pytest.mark.parametrize("name", [CYCLE_TIME, FUSION, IDLE, SINGLE_COPY, OPAL_PREFIX, PMIX_SECURITY])
def test_nothing_is_set_over_what_the_user_set(host: Host, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(open_mpi, "single_copy_allowed", lambda: False)
    everything = tune_all(ranks(8, launcher="srun"))
    host.environment.clear()
    host.environment[name] = "the user's"
    chosen = tune_all(ranks(8, launcher="srun"))
    assert host.environment[name] == "the user's"
    # What was not done is not claimed either; what only makes things work is never spoken of.
    assert len(chosen) == len(everything) - (name not in (OPAL_PREFIX, PMIX_SECURITY))


def test_between_hosts_mpi_reduces_large_messages_in_a_ring(host: Host) -> None:
    tune_open_mpi(ranks(4))
    tune_open_mpi(World(size=2, local_size=1, launcher="mpirun"))
    assert RULES not in host.environment
    chosen = tune_open_mpi(World(size=4, local_size=2, launcher="mpirun"))
    assert chosen["MPI's all-reduce"] == "a ring from 1 MB up"
    assert Path(host.environment[RULES]).is_file()
    assert host.environment[USE_RULES] == "1"


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [("max 100000", 8), ("400000 100000", 4), ("150000 100000", 1), ("50000 100000", 1), ("9900000 100000", 8)],
)
def test_a_containers_cpu_quota_counts_as_its_cores(monkeypatch: pytest.MonkeyPatch, cpu_max: str, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(Path, "read_text", lambda _: cpu_max)
    assert host_cores.__wrapped__() == cores

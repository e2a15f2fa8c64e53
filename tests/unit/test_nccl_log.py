"""What is read from NCCL's log. Its lines are written after NCCL's own formats; none of them comes from a run here."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import World
from trainer.cluster.nccl_log import NcclLog, describe_transports, read_transports
from trainer.config import RunConfig
from trainer.errors import ConfigError
from trainer.loop import joining
from trainer.loop.joining import _connect
from trainer.strategies.single import SingleStrategy

HEAD = """\
a:71:71 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to =eth0
a:71:71 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>
a:71:71 [0] NCCL INFO NCCL version 2.30.7+cuda13.0
a:71:95 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>
a:71:95 [0] NCCL INFO Channel 00/02 : 0 1 2 3
"""
LINE = "a:71:95 [0] NCCL INFO Channel 00/0 : {}\n"
VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "nccl.conf"))


@pytest.mark.parametrize(
    ("connection", "transport"),
    [
        ("3[3] -> 0[0] [receive] via NET/IB/0/GDRDMA", "NET/IB with GPUDirect RDMA"),
        ("0[0] -> 2[0] [send] via NET/IB/1(1)/GDRDMA/Shared", "NET/IB with GPUDirect RDMA"),
        ("0[0] -> 2[0] [send] via NET/IB/0/GDRDMA(PCI)", "NET/IB with GPUDirect RDMA"),
        ("0[0] -> 2[0] [send] via NET/IBext_v8/2", "NET/IBext_v8 without GPUDirect RDMA"),
        ("0[0] -> 2[0] [send] via NET/AWS Libfabric/0/GDRDMA", "NET/AWS Libfabric with GPUDirect RDMA"),
        ("0[0] -> 2[0] [send] via COLLNET/SHARP/0/GDRDMA", "NET/SHARP with GPUDirect RDMA"),
        ("1[0] -> 0[0] [receive] via NET/Socket/0", "TCP sockets"),
        ("0[0] -> 1[1] via P2P/CUMEM/read", "P2P"),
        ("0[0] -> 1[1] via P2P/IPC", "P2P"),
        ("0[0] -> 1[1] via SHM/direct/direct", "shared memory"),
        ("0[1a0] -> 1[1b0] via direct shared memory", "shared memory"),
    ],
)
def test_a_connection_tells_its_transport(connection: str, transport: str) -> None:
    assert read_transports(HEAD + LINE.format(connection)) == {transport}


def test_transports_of_all_ranks_are_a_few_words() -> None:
    assert read_transports(HEAD) == set()
    assert describe_transports([]) == ""
    log = LINE.format("0[0] -> 2[0] [send] via NET/IB/0/GDRDMA") + LINE.format("0[0] -> 1[1] via P2P/CUMEM") * 2
    assert describe_transports(read_transports(log)) == "P2P, NET/IB with GPUDirect RDMA"
    assert describe_transports({"TCP sockets", "shared memory"}) == "shared memory, TCP sockets"


def test_the_log_is_a_private_file_which_is_gone_afterwards() -> None:
    log = NcclLog()
    file = Path(os.environ["NCCL_DEBUG_FILE"])
    assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT")
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text(HEAD)
    assert log.read() == HEAD
    log.close()
    log.close()
    assert log.read() == ""
    assert not file.exists()
    assert not any(name in os.environ for name in VARIABLES)


@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_user_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "")
    log = NcclLog()
    assert log.read() == ""
    log.close()
    assert {variable: os.environ.get(variable) for variable in VARIABLES} == dict.fromkeys(VARIABLES) | {name: ""}


def test_what_a_file_of_settings_says_stays(tmp_path: Path) -> None:
    (tmp_path / "nccl.conf").write_text("NCCL_IB_HCA=mlx5_0\nNCCL_DEBUG=WARN\n")
    NcclLog().close()
    assert not any(name in os.environ for name in VARIABLES)


class Connected(SingleStrategy):
    """A rank of a job over NCCL, whose log is there after its first all-reduce."""

    lines = LINE.format("0[0] -> 1[0] [send] via NET/IB/0/GDRDMA")

    def __init__(self) -> None:
        super().__init__(World())
        self.is_over_nccl = True
        self.world = replace(self.world, rank=0, size=2)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        Path(os.environ["NCCL_DEBUG_FILE"]).write_text(self.lines)
        return tensor


def test_the_first_line_tells_how_the_ranks_are_connected() -> None:
    log = NcclLog()
    assert _connect(Connected(), log) == "; NCCL: NET/IB with GPUDirect RDMA"
    log.close()


@pytest.mark.parametrize(("over_nccl", "says"), [(True, "; NCCL: NET/IB with GPUDirect RDMA\n"), (False, "(cpu)\n")])
def test_a_rank_with_a_gpu_joins_with_a_log(
    over_nccl: bool, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files: list[Path] = []

    def make(*_: object) -> Connected:
        files.append(Path(os.environ["NCCL_DEBUG_FILE"]))
        strategy = Connected()
        strategy.is_over_nccl, strategy.tuning = over_nccl, {}
        return strategy

    world = World(size=2, local_size=2, device=torch.device("cuda", 0))
    for name in ("report_failures", "wait_for_threads_before_forks", "write_whole_lines", "report_join"):
        monkeypatch.setattr(joining, name, lambda *_: None)
    for name, value in {"current_world": world, "gpu_id": "GPU-0", "share_machine": {}}.items():
        monkeypatch.setattr(joining, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(joining, "make_strategy", make)
    joining.join("auto", RunConfig(hang_timeout_s=0))
    (line,) = capsys.readouterr().err.splitlines(keepends=True)
    assert line.endswith(says)
    assert not files[0].exists()
    assert "NCCL_DEBUG" not in os.environ


def test_a_log_without_connections_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connected, "lines", HEAD)
    log = NcclLog()
    assert _connect(Connected(), log) == ""
    log.close()


def test_ranks_that_are_not_connected_in_time_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> torch.Tensor:
        time.sleep(0.3)
        raise ConfigError("no")

    monkeypatch.setattr(joining, "_UNCONNECTED_S", 0.05)
    monkeypatch.setattr(Connected, "all_reduce", fails)
    log = NcclLog()
    with pytest.raises(ConfigError):
        _connect(Connected(), log)
    log.close()
    assert capsys.readouterr().err.startswith(
        "trainer: NCCL has not connected the ranks so far; `trainer doctor --gpu`"
    )

"""The communication benchmark: its figures, its error messages, its plot, and a run of every transport."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from comm.gpu_links import describe_rdma, parse_topology
from comm.report import Row, plot, table_line, write_json
from comm.tcp_bytes import tcp_bytes_sent
from comm.transports import TRANSPORTS, Transport
from comm_bench import _measure, _parse_options, _time
from torch import Tensor

from tests.distributed.harness import ROOT, run_job
from trainer.cluster.exit_codes import MISTAKE
from trainer.cluster.network import machine_id
from trainer.cluster.rendezvous import Rendezvous
from trainer.cluster.world import World

SCRIPT = "scripts/comm_bench.py"
TOPOLOGY = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV4\tSYS\tPHB\t0-15
GPU1\tNV4\t X \tPIX\tSYS\t0-15
GPU2\tSYS\tPIX\t X \tNODE\t16-31
NIC0\tPHB\tSYS\tNODE\t X
"""


def row(size: int = 2**20, seconds: float = 1e-3, **settings: object) -> Row:
    values = {"transport": "MPI", "key": "mpi", "size": size, "ranks": 4, "operations": 5, "out_of_place_s": seconds,
              "in_place_s": seconds / 2, "wrong": 0, "bytes_sent": None, "tcp_bytes": None}  # fmt: skip
    return Row(**{**values, **settings})  # type: ignore[arg-type]


def test_bandwidths_are_those_of_nccl_tests() -> None:
    one = row(size=10**9, seconds=0.5)
    assert one.algorithm_bandwidth(0.5) == 2e9
    assert one.bus_bandwidth(0.5) == 2e9 * 2 * 3 / 4
    cells = table_line(one).split()
    assert " ".join(cells[:9]) == "MPI 1000000000 500000.0 2.000 3.000 250000.0 4.000 6.000 0"
    assert " ".join(cells[9:]) == "not counted not counted"
    assert table_line(row(bytes_sent=7.0, tcp_bytes=9.0)).split()[-2:] == ["7", "9"]


def test_ranks_in_several_containers_share_the_machines_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)

    class Greedy(Transport):
        name = "greedy"

        def __init__(self, *_: object) -> None:
            torch.set_num_threads(2)

        def in_place(self, tensor: Tensor) -> None:
            seen.add(torch.get_num_threads())

        def out_of_place(self, tensor: Tensor, result: Tensor) -> None:
            result.copy_(tensor)

    monkeypatch.setitem(TRANSPORTS, "greedy", Greedy)
    threads, world = torch.get_num_threads(), World()
    try:
        options = Namespace(sizes=[4], repeats=1, max_seconds=1.0, compute_ms=0.0)
        (measured,) = _measure("greedy", world, Rendezvous(world), options, [machine_id()] * 2)
    finally:
        torch.set_num_threads(threads)
    assert (measured.wrong, seen) == (0, {1})


def test_each_operation_is_preceded_by_computing() -> None:
    class Counting(Transport):
        operations = 0

        def in_place(self, tensor: Tensor) -> None:
            self.operations += 1

        def out_of_place(self, tensor: Tensor, result: Tensor) -> None:
            raise AssertionError

    transport, before = Counting(), time.thread_time()
    seconds = _time(lambda: transport.in_place(torch.zeros(1)), transport, 3, 0.02)
    assert transport.operations == 3
    assert time.thread_time() - before >= 0.06
    assert seconds >= 0.02


def test_bytes_over_tcp_are_counted_by_the_kernel() -> None:
    before = tcp_bytes_sent()
    assert before is not None
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        peer, _ = server.accept()
        with peer:
            client.sendall(b"x" * 5000)
            peer.sendall(b"y" * 70)
            assert len(peer.recv(5000, socket.MSG_WAITALL)) == 5000
            assert tcp_bytes_sent() == before + 5070


def test_the_json_file_has_every_field(tmp_path: Path) -> None:
    write_json(tmp_path / "comm.json", {"ranks": "4"}, [row(bytes_sent=7.0)])
    written = json.loads((tmp_path / "comm.json").read_text())
    assert written["where"] == {"ranks": "4"}
    assert written["rows"][0]["bytes_sent"] == 7.0
    assert written["rows"][0]["busbw"] == pytest.approx(2**20 / 1e-3 * 1.5)
    assert [file.name for file in tmp_path.iterdir()] == ["comm.json"]


def test_the_plot_names_every_transport(tmp_path: Path) -> None:
    rows = [row(size=4**power, transport=name) for power in range(1, 5) for name in ("MPI", "ring (trainer)")]
    plot(tmp_path / "comm.svg", {"ranks": "4 on a: 2, b: 2", "device": "a CPU"}, rows)
    drawn = (tmp_path / "comm.svg").read_text()
    for text in ("MPI", "ring (trainer)", "Bus bandwidth", "4 on a: 2, b: 2"):
        assert re.search(f"<!-- .*{re.escape(text)}", drawn), text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-size", "3"], "'3' is not a size; valid are 4 bytes and more, as in 4, 64K or 256M"),
        (["--max-size", "2Q"], "'2Q' is not a size"),
        (["--min-size", "8K", "--max-size", "4K"], "--max-size is 4096 bytes, less than --min-size, 8192"),
        (["--compute-ms", "-1"], "--compute-ms is -1; it must be at least 0"),
        (["--factor", "1"], "--factor is 1; it must be at least 2"),
        (["--plot", "comm.txt"], "--plot is comm.txt; valid endings are .png, .svg, .pdf"),
        (["--only", "smoke"], "invalid choice: 'smoke'"),
    ],
)
def test_an_invalid_option_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", [SCRIPT, *arguments])
    with pytest.raises(SystemExit) as ended:
        _parse_options()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.distributed
def test_a_file_that_cannot_be_written_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--json", "nowhere/comm.json"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == MISTAKE
    (line,) = done.stderr.splitlines()
    assert "nowhere/comm.json cannot be written: No such file" in line


def test_gpu_links_are_read_from_the_topology() -> None:
    found = parse_topology(TOPOLOGY)
    assert found[0, 1] == "NVLink, 4 links"
    assert found[0, 2] == "PCIe and the link between CPUs"
    assert found[1, 2] == "PCIe, one bridge"
    assert parse_topology("") == {}


def test_rdma_is_reported_with_its_reason(tmp_path: Path) -> None:
    assert "no, there is no adapter" in describe_rdma(tmp_path)
    (tmp_path / "class/infiniband/mlx5_0").mkdir(parents=True)
    assert "neither nvidia_peermem nor nv_peer_mem is loaded" in describe_rdma(tmp_path)
    (tmp_path / "module/nvidia_peermem").mkdir(parents=True)
    assert describe_rdma(tmp_path) == "GPUDirect RDMA: yes, for mlx5_0 (module nvidia_peermem is loaded)"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("launcher", "expected", "left_out"),
    [
        ("horovodrun-mpi", {"MPI", "ring", "Gloo", "parameter server", "Horovod over MPI"}, {"nccl"}),
        pytest.param(
            *("horovodrun-gloo", {"Gloo", "parameter server", "Horovod over Gloo"}, {"mpi", "ring", "nccl"}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("torchrun", {"Gloo", "parameter server"}, {"mpi", "ring", "nccl", "horovod"}), marks=pytest.mark.slow
        ),
    ],
)
def test_every_available_transport_sums_correctly(
    tmp_path: Path, launcher: str, expected: set[str], left_out: set[str]
) -> None:
    json_file = tmp_path / "comm.json"
    arguments = ["--max-size", "2M", "--factor", "512", "--repeats", "1", "--device", "cpu", "--json", str(json_file)]
    outcome = run_job(launcher, 3, [SCRIPT, *arguments])
    assert outcome.code == 0, outcome.output
    rows = json.loads(json_file.read_text())["rows"]
    assert {entry["transport"].removesuffix(" (trainer)") for entry in rows} == expected
    assert set(re.findall(r"# (\w+): left out", outcome.output)) == left_out
    for entry in rows:
        assert entry["wrong"] == 0
        assert entry["in_place_s"] > 0
    sizes = [4, 2048, 2**20]
    assert [entry["size"] for entry in rows] == sizes * len(expected)
    for entry in rows:
        if entry["transport"] == "ring (trainer)":
            assert entry["bytes_sent"] == pytest.approx(2 * entry["size"] * 2 / 3)
        elif entry["transport"] == "parameter server (trainer)":
            assert entry["bytes_sent"] == entry["size"]
        if entry["transport"] in ("parameter server (trainer)", "Gloo", "Horovod over Gloo"):
            # Over TCP also on one host: no algorithm sends less than a rank's share, and none of these twice as much.
            assert 0.99 * entry["size"] < entry["tcp_bytes"] < 2 * 1.34 * entry["size"] + 10_000

"""The communication benchmark: its figures, its error messages, and a run of every transport."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from comm.report import Row, table_line, write_json
from comm_bench import _parse_options

from tests.distributed.harness import run_job

SCRIPT = "scripts/comm_bench.py"


def row(size: int = 2**20, seconds: float = 1e-3, transport: str = "MPI", bytes_sent: float | None = None) -> Row:
    return Row(
        transport=transport,
        key="mpi",
        size=size,
        ranks=4,
        operations=5,
        seconds=seconds,
        wrong=0,
        bytes_sent=bytes_sent,
    )


def test_bandwidths_are_those_of_nccl_tests(tmp_path: Path) -> None:
    one = row(size=10**9, seconds=0.5)
    assert (one.algorithm_bandwidth, one.bus_bandwidth) == (2e9, 2e9 * 2 * 3 / 4)
    assert table_line(one).split() == ["MPI", "1000000000", "500000.0", "2.000", "3.000", "0", "not", "counted"]
    write_json(tmp_path / "comm.json", {"ranks": "4"}, [row(bytes_sent=7.0)])
    (written,) = json.loads((tmp_path / "comm.json").read_text())["rows"]
    assert written["bytes_sent"] == 7.0
    assert written["busbw"] == pytest.approx(2**20 / 1e-3 * 1.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "3"], "'3' is not a size; valid are 4 bytes and more, as in 4, 64K or 256M"),
        (["--sizes", "2Q"], "'2Q' is not a size"),
        (["--compute-ms", "-1"], "--repeats must be at least 1, and --compute-ms not negative"),
        (["--plot", "comm.txt"], "--plot is comm.txt; valid endings are .png, .svg, .pdf"),
    ],
)
def test_an_invalid_option_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", [SCRIPT, *arguments])
    with pytest.raises(SystemExit):
        _parse_options()
    assert message in capsys.readouterr().err.splitlines()[-1]


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
    arguments = ["--sizes", "4", "2K", "1M", "--repeats", "1", "--device", "cpu", "--json", str(json_file)]
    outcome = run_job(launcher, 3, [SCRIPT, *arguments])
    assert outcome.code == 0, outcome.output
    rows = json.loads(json_file.read_text())["rows"]
    assert {entry["transport"].removesuffix(" (trainer)") for entry in rows} == expected
    assert set(re.findall(r"# (\w+): left out", outcome.output)) == left_out
    assert [entry["size"] for entry in rows] == [4, 2048, 2**20] * len(expected)
    for entry in rows:
        assert entry["wrong"] == 0
        assert entry["seconds"] > 0
        if entry["transport"] == "ring (trainer)":
            assert entry["bytes_sent"] == pytest.approx(2 * entry["size"] * 2 / 3)
        elif entry["transport"] == "parameter server (trainer)":
            assert entry["bytes_sent"] == entry["size"]

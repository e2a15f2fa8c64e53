"""The all-reduce of `trainer doctor --gpu`, run by its agents on CPUs over Gloo in place of GPUs over NCCL."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainer.ops.doctor import look
from trainer.ops.doctor.checks.gpus import first_error
from trainer.ops.doctor.connection import AgentError, Connection
from trainer.ops.supervise.hosts import Host

pytestmark = pytest.mark.timeout(180)

LIMIT_S = 90.0


@pytest.fixture(scope="module")
def agents() -> Iterator[dict[str, Connection]]:
    started = {name: Connection(Host("localhost", 1), 60, 500) for name in ("a", "b")}
    try:
        assert not any(connection.login().error for connection in started.values())
        yield started
    finally:
        for connection in started.values():
            connection.close()


def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Have the agents run the program with a fault."""
    source = look.ALL_REDUCE.read_text()
    assert source.count(old) == 1
    stand_in(tmp_path, monkeypatch, source.replace(old, new))


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Have the agents run another program."""
    (tmp_path / "all_reduce.py").write_text(source)
    monkeypatch.setattr(look, "ALL_REDUCE", tmp_path / "all_reduce.py")


def processes_with(text: str) -> list[str]:
    """Return the processes that have an argument with this text."""
    processes = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        processes += [file.parent.name] * any(text in word for word in words)
    return processes


def test_two_ranks_of_one_host_sum_right_and_say_how_fast(agents: dict[str, Connection]) -> None:
    tried = look.all_reduce({"a": agents["a"]}, "gloo", limit_s=LIMIT_S)
    assert (tried.hosts, tried.was_killed) == (("a",), False)
    assert tried.result, tried.outputs
    assert (tried.result["wrong"], tried.result["bytes"], tried.result["device"]) == (0, 2**20, "cpu")
    # Of two ranks, the bus bandwidth of nccl-tests is that of the algorithm: 2 (n - 1) / n is 1.
    assert tried.result["bus_bytes_per_s"] == pytest.approx(tried.result["bytes"] / tried.result["seconds"])
    assert tried.result["bus_bytes_per_s"] > 1e6


def test_two_hosts_sum_over_the_network_and_a_wrong_sum_is_noticed(
    agents: dict[str, Connection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(tmp_path, monkeypatch, "values = start + rank", "values = start + rank + rank * (start == 7)")
    tried = look.all_reduce(agents, "gloo", address="127.0.0.1", limit_s=LIMIT_S)
    assert tried.hosts == ("a", "b")
    assert tried.result, tried.outputs
    assert tried.result["wrong"] == 2 * 263  # of 2**18 values, those whose remainder is 7, and no others; on both ranks


def test_a_rank_that_fails_is_told_before_the_limit(
    agents: dict[str, Connection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "import sys, time; 1 / int(sys.argv[2]) and time.sleep(1000)")
    started = time.monotonic()
    tried = look.all_reduce({"a": agents["a"]}, "gloo", limit_s=LIMIT_S)
    assert time.monotonic() - started < LIMIT_S
    assert not tried.result
    assert first_error(tried) == "ZeroDivisionError: division by zero"


@pytest.mark.slow  # as any rank that fails
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_fails_with_one_line(agents: dict[str, Connection]) -> None:
    tried = look.all_reduce({"a": agents["a"]}, "nccl", limit_s=LIMIT_S)
    assert not tried.result
    assert "Error: " in first_error(tried)


def test_ranks_that_hang_are_killed_at_the_limit(
    agents: dict[str, Connection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "import time; time.sleep(1000)")
    tried = look.all_reduce({"a": agents["a"]}, "gloo", limit_s=2)
    assert tried.was_killed
    assert not tried.result


def test_ranks_end_with_their_agent_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    agent = Connection(Host("localhost", 1), 60, 170)
    try:
        assert not agent.login().error
        source = f"{look.ALL_REDUCE.read_text()}\n# {tmp_path}\n"
        arguments = {"source": source, "backend": "gloo", "size": 2, "interface": ""}
        with pytest.raises(AgentError, match="did not answer to 'all_reduce'"):  # the other rank never comes
            agent.call("all_reduce", 4, **arguments, ranks=[0], store="", limit_s=120)
        assert len(processes_with(str(tmp_path))) == 1
    finally:
        agent.close()
    until = time.monotonic() + 20
    while processes_with(str(tmp_path)) and time.monotonic() < until:
        time.sleep(0.1)
    assert processes_with(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []

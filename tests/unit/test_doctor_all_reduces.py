"""What `trainer doctor --gpu` concludes from an all-reduce between two GPUs, whose output is written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.doctor_facts import changed, findings_of, healthy, pair, software, the_only
from tests.unit.test_doctor_gpus import gpus_of_b, near, pci, two, with_gpus
from trainer.ops.doctor.connection import AgentError
from trainer.ops.doctor.examine import as_json, as_text
from trainer.ops.doctor.facts import AllReduce, Facts
from trainer.ops.doctor.look import try_all_reduces

LOG = (
    "b:71:71 [0] NCCL INFO NCCL version 2.30.7+cuda13.0\n"
    "b:71:95 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via {}\n"
    "b:71:95 [0] NCCL INFO ncclCommInitRankConfig comm 0x55d0 rank 0 nranks 2 - Init COMPLETE\n"
)
WARNED = "b:72:96 [1] misc/shmutils.cc:85 NCCL WARN Error: failed to extend /dev/shm/nccl-x1 to 9637892 bytes\n"
RAISED = (
    "[rank1]: Traceback (most recent call last):\n"
    "[rank1]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error\n"
    "[rank1]: ncclSystemError: System call failed or device error.\n"
)


def result(rate: float, wrong: int = 0) -> str:
    value = {"bytes": 2**26, "seconds": 2**26 / rate, "bus_bytes_per_s": rate, "wrong": wrong, "device": "NVIDIA H100"}
    return json.dumps(value) + "\n"


def after(*outputs: str, hosts: tuple[str, ...] = ("b",), link: str = "NV18", was_killed: bool = False) -> Facts:
    tried = AllReduce(hosts=hosts, outputs=outputs, was_killed=was_killed, limit_s=30.0)
    return replace(with_gpus(two(), near(link), pci=pci()), all_reduces=(tried,))


def test_a_fast_one_is_a_figure_and_no_finding() -> None:
    facts = after(LOG.format("P2P/CUMEM") + result(230e9), "")
    assert findings_of(facts) == []
    assert "all-reduce between two GPUs of b 230 GB/s (P2P)" in as_text(facts, [], 1.0)
    (said,) = json.loads(as_json(facts, [], 1.0))["all_reduces"]
    assert (said["hosts"], said["transports"], said["outputs"]) == (["b"], "P2P", [])
    assert said["result"]["bus_bytes_per_s"] == 230e9


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (
            after(LOG.format("SHM/direct/direct") + result(6e9), ""),
            "WARNING: an all-reduce over NCCL between GPU 0 and "
            "1 of b, which NVLink connects, moves 6 GB/s (shared memory), less than PCIe does",
        ),
        (
            after(LOG.format("P2P/IPC") + result(20e9, wrong=7), ""),
            "PROBLEM: an all-reduce over NCCL between GPU 0 and "
            "1 of b computes wrong sums; where it works with NCCL_P2P_DISABLE=1",
        ),
        (
            after(LOG.format("P2P/IPC"), "", was_killed=True),
            "PROBLEM: an all-reduce over NCCL between GPU 0 and 1 of b "
            "has not ended in 30 s; where it works with NCCL_P2P_DISABLE=1",
        ),
        (
            after("", "", hosts=("a", "b"), was_killed=True),
            "between GPUs of a and b has not ended in 30 s; NCCL takes ports that the kernel gives",
        ),
        (
            after(LOG.format("SHM/direct/direct") + RAISED, WARNED + RAISED),
            "PROBLEM: an all-reduce over NCCL between "
            "GPU 0 and 1 of b fails: Error: failed to extend /dev/shm/nccl-x1 to 9637892 bytes; `NCCL_DEBUG=INFO`",
        ),
        (after("", RAISED), "fails: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled"),
        (after("", "ModuleNotFoundError: No module named 'torch'\n"), "fails: ModuleNotFoundError: No module named"),
        (after("RuntimeError: Connection closed by peer [127.0.0.1]:1\n", RAISED), "fails: torch.distributed."),
        (after("RuntimeError: Connection reset by peer\n", ""), "fails: RuntimeError: Connection reset by peer"),
        (after("", "Killed\n"), "fails: Killed"),
        (after("", ""), "fails: it prints nothing"),
        (after("", RAISED, hosts=("a", "b"), was_killed=True), "between GPUs of a and b fails: torch.distributed."),
    ],
)
def test_what_goes_wrong(facts: Facts, line: str) -> None:
    assert line in the_only(facts)


def test_what_another_finding_explains_is_not_repeated() -> None:
    facts = after("", RAISED)
    facts = changed(facts, gpus={"b": gpus_of_b(two(ecc="3"), near("NV18"))})
    assert "uncorrected memory errors" in the_only(facts)
    unreached = {("a", "b"): pair("b", errors={"1": "timed out"}), ("b", "a"): pair("a")}
    gpus = gpus_of_b(two().splitlines()[0])
    assert try_them(healthy(gpus={"a": gpus, "b": gpus}, pairs=unreached), "a", "b")[1] == []


def test_without_nvlink_and_between_hosts_a_slow_one_is_no_finding() -> None:
    assert findings_of(after(LOG.format("SHM/direct/direct") + result(6e9), "", link="PHB")) == []
    assert findings_of(after(LOG.format("NET/Socket/0") + result(1e9), "", hosts=("a", "b"))) == []


class Agent:
    """A connection that notes what it is asked for, and sums at once."""

    def __init__(self, name: str, asked: list[tuple[str, str, Mapping[str, Any]]]) -> None:
        self.name, self.asked = name, asked

    def call(self, operation: str, timeout_s: float, **arguments: Any) -> Any:
        self.asked.append((self.name, operation, arguments))
        if operation == "free_port":
            return 40123
        return {"outputs": [result(1e9) for _ in arguments["ranks"]], "killed": False}


def try_them(facts: Facts, *names: str) -> tuple[Facts, list[tuple[str, str, Mapping[str, Any]]]]:
    asked: list[tuple[str, str, Mapping[str, Any]]] = []
    agents: Any = {host: Agent(host.name, asked) for host in facts.hosts if host.name in names}
    try_all_reduces(facts, agents)
    return facts, asked


def test_two_gpus_of_each_host_then_those_of_two_hosts() -> None:
    gpus = gpus_of_b(two())
    facts, asked = try_them(healthy(gpus={"a": gpus, "b": gpus}), "a", "b")
    assert [tried.hosts for tried in facts.all_reduces] == [("a",), ("b",), ("a", "b")]
    assert all(tried.result for tried in facts.all_reduces)
    within = [arguments for _, operation, arguments in asked if operation == "all_reduce"][:2]
    assert all((part["ranks"], part["store"], part["backend"]) == ([0, 1], "", "nccl") for part in within)
    between = sorted(
        (name, arguments["ranks"], arguments["store"], arguments["interface"])
        for name, operation, arguments in asked[3:]
    )
    assert between == [("a", [0], "tcp://10.0.0.1:40123", "eth0"), ("b", [1], "tcp://10.0.0.1:40123", "eth0")]


def test_hosts_without_a_second_gpu_or_without_cuda_are_left_out() -> None:
    gpus = gpus_of_b(two().splitlines()[0])
    facts, _ = try_them(healthy(gpus={"a": gpus, "b": gpus}), "a", "b")
    assert [tried.hosts for tried in facts.all_reduces] == [("a", "b")]
    none = {name: software(versions={"CUDA": ""}) for name in ("a", "b")}
    facts, asked = try_them(healthy(gpus={"a": gpus, "b": gpus}, software=none), "a", "b")
    assert (facts.all_reduces, asked) == ((), [])
    assert try_them(healthy(), "a", "b")[1] == []


def test_an_agent_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> None:
        raise AgentError("the agent on host b has ended")

    monkeypatch.setattr(Agent, "call", lost)
    facts, _ = try_them(with_gpus(two()), "b")
    assert facts.incomplete == ("the agent on host b has ended",)

"""What `trainer doctor --gpu` concludes from what nvidia-smi prints, and from an all-reduce between two GPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.doctor_facts import changed, findings_of, healthy, pair, software, the_only
from trainer.ops.doctor import look
from trainer.ops.doctor.checks.gpus import read_query
from trainer.ops.doctor.examine import as_json, as_text
from trainer.ops.doctor.facts import AllReduce, Facts, HostFacts
from trainer.ops.ssh import NO_ANSWER

LINE = "{index}, NVIDIA H100 80GB HBM3, {driver}, {ecc}, {hot}, {braked}\n"
WELL = {"driver": "580.65.06", "ecc": "0", "hot": "Not Active", "braked": "Not Active"}
WARNED = "b:72:96 [1] misc/shmutils.cc:85 NCCL WARN Error: failed to extend /dev/shm/nccl-x1 to 9637892 bytes\n"
RAISED = (
    "[rank1]: Traceback (most recent call last):\n"
    "[rank1]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error\n"
    "[rank1]: ncclSystemError: System call failed or device error.\n"
)


def with_gpus(query: str) -> Facts:
    return healthy(gpus={"b": query})


def two(**changes: str) -> str:
    return LINE.format(index=0, **WELL) + LINE.format(index=1, **{**WELL, **changes})


def test_two_gpus_in_order_are_no_finding() -> None:
    assert [gpu.number for gpu in read_query(two())] == ["0", "1"]
    assert findings_of(with_gpus(two())) == []
    assert findings_of(healthy()) == [], "they are not looked at"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"ecc": "3"}, "PROBLEM: GPU 1 (NVIDIA H100 80GB HBM3) of b has 3 uncorrected memory errors"),
        ({"hot": "Active"}, "WARNING: GPU 1 (NVIDIA H100 80GB HBM3) of b is slowed down because of its temperature"),
        ({"braked": "Active"}, "slowed down because of its power supply"),
    ],
)
def test_the_state_of_a_gpu(changes: dict[str, str], line: str) -> None:
    assert line in the_only(with_gpus(two(**changes)))
    assert findings_of(with_gpus(two(ecc="[N/A]"))) == []


def test_too_few_gpus_or_none() -> None:
    one = LINE.format(index=0, **WELL)
    assert "b has 1 of the 2 GPUs that its ranks need; name fewer slots (-H b:1)" in the_only(with_gpus(one))
    assert "b has 0 of the 2 GPUs that its ranks need; `nvidia-smi` there has to list a GPU" in the_only(with_gpus(""))
    unread = "0, GPU requires reset\n" + LINE.format(index=1, **WELL)
    assert "b has 1 of the 2 GPUs" in the_only(with_gpus(unread))


def test_pytorch_without_cuda_and_a_driver_that_is_too_old() -> None:
    none = {name: software(versions={"CUDA": ""}) for name in ("a", "b")}
    assert "PyTorch on b was built without CUDA" in the_only(changed(with_gpus(two()), software=none))
    old = LINE.format(index=0, **{**WELL, "driver": "535.183.01"}) + LINE.format(index=1, **WELL)
    assert "the driver of b, 535.183.01, is too old for PyTorch's CUDA 13.0" in the_only(with_gpus(old))


def result(rate: float, wrong: int = 0) -> dict[str, Any]:
    return {"bytes": 2**26, "seconds": 2**26 / rate, "bus_bytes_per_s": rate, "wrong": wrong, "device": "NVIDIA H100"}


def after(hosts: tuple[str, ...] = ("b",), **values: Any) -> Facts:
    return replace(with_gpus(two()), all_reduces=(AllReduce(hosts=hosts, **values),))


def test_a_right_all_reduce_is_a_figure_and_no_finding() -> None:
    facts = after(result=result(230e9))
    assert findings_of(facts) == []
    assert "all-reduce between two GPUs of b 230 GB/s" in as_text(facts, [], 1.0)
    (said,) = json.loads(as_json(facts, [], 1.0))["all_reduces"]
    assert (said["hosts"], said["result"]["bus_bytes_per_s"]) == (["b"], 230e9)


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (
            after(result=result(20e9, wrong=7)),
            "PROBLEM: an all-reduce over NCCL between GPU 0 and "
            "1 of b computes wrong sums; where it works with NCCL_P2P_DISABLE=1",
        ),
        (
            after(error=NO_ANSWER),
            "PROBLEM: an all-reduce over NCCL between GPU 0 and 1 of b "
            "has not ended in time; where it works with NCCL_P2P_DISABLE=1",
        ),
        (
            after(("a", "b"), error=NO_ANSWER),
            "between GPUs of a and b has not ended in time; NCCL takes ports that the kernel gives",
        ),
        (
            after(output=RAISED + WARNED + RAISED),
            "PROBLEM: an all-reduce over NCCL between "
            "GPU 0 and 1 of b fails: Error: failed to extend /dev/shm/nccl-x1 to 9637892 bytes; `NCCL_DEBUG=INFO`",
        ),
        (after(output=RAISED), "fails: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled"),
        (after(output="ModuleNotFoundError: No module named 'torch'"), "fails: ModuleNotFoundError: No module named"),
        (after(output="RuntimeError: Connection closed by peer [::1]:1\n" + RAISED), "fails: torch.distributed."),
        (after(output="RuntimeError: Connection reset by peer\n"), "fails: RuntimeError: Connection reset by peer"),
        (after(error="it has ended with code -9"), "fails: it has ended with code -9"),
        (after(("a", "b"), output=RAISED, error=NO_ANSWER), "between GPUs of a and b fails: torch.distributed."),
    ],
)
def test_an_all_reduce_that_goes_wrong(facts: Facts, line: str) -> None:
    assert line in the_only(facts)


def test_what_another_finding_explains_is_not_repeated() -> None:
    facts = changed(after(output=RAISED), gpus={"b": two(ecc="3")})
    assert "uncorrected memory errors" in the_only(facts)


def tried(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Return the hosts between which all-reduces are tried, and the address."""

    def all_reduce(hosts: tuple[HostFacts, HostFacts], backend: str, address: str = "", **_: float) -> AllReduce:
        assert backend == "nccl"
        asked.append((hosts[0].name, hosts[1].name, address))
        return AllReduce(hosts=(hosts[0].name,), result=result(1e9))

    asked: list[tuple[str, str, str]] = []
    monkeypatch.setattr(look, "all_reduce", all_reduce)
    look.try_all_reduces(facts)
    assert len(facts.all_reduces) == len(asked)
    return sorted(asked, key=lambda ends: ends[0] != ends[1])


def test_two_gpus_of_each_host_then_those_of_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    both = tried(healthy(gpus={"a": two(), "b": two()}), monkeypatch)
    assert sorted(both[:2]) == [("a", "a", ""), ("b", "b", "")]
    assert both[2:] == [("a", "b", "10.0.0.1")]


def test_hosts_without_a_second_gpu_or_without_cuda_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    one = dict.fromkeys(("a", "b"), two().splitlines()[0])
    assert tried(healthy(gpus=one), monkeypatch) == [("a", "b", "10.0.0.1")]
    none = {name: software(versions={"CUDA": ""}) for name in ("a", "b")}
    assert tried(healthy(gpus=one, software=none), monkeypatch) == []
    assert tried(healthy(), monkeypatch) == []
    unreached = {("a", "b"): pair("b", errors={"1": "timed out"}), ("b", "a"): pair("a")}
    assert tried(healthy(gpus=one, pairs=unreached), monkeypatch) == []

"""What an all-reduce between two GPUs says: whether it ends, whether it is right, and how fast it is."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from trainer.ops.doctor.checks.links import read_matrix
from trainer.ops.doctor.facts import AllReduce, Facts
from trainer.ops.doctor.finding import Cause, Finding, problem, warning

PCIE = 12e9
"""Bytes a second through 16 lanes of PCIe 3.0. NVLink gives several times as many."""
_WARNING = re.compile(r"NCCL WARN (.+)")
_ERROR = re.compile(r"[\w.]*(?:Error|Exception): .+|[\w.]+Error$")
_CONSEQUENCE = re.compile(r"[Cc]onnection (?:closed|reset) by|[Rr]emote process exited")
_WITHOUT_P2P = (
    "where it works with NCCL_P2P_DISABLE=1 before the command, P2P is at fault: IOMMU or ACS, in the firmware"
)
_BY_HAND = "`NCCL_DEBUG=INFO` before the job's command shows the rest"


def check_all_reduces(facts: Facts, without: Collection[str]) -> Iterator[Finding]:
    """Yield what is wrong with the all-reduces that were tried.

    Args:
        without: hosts whose GPUs have a problem that was found already.
    """
    for one in facts.all_reduces:
        if one.result:
            yield from _figure(facts, one)
        elif not set(one.hosts) & set(without):
            yield _failure(one)


def _name(one: AllReduce) -> str:
    if len(one.hosts) == 1:
        return f"an all-reduce over NCCL between GPU 0 and 1 of {one.hosts[0]}"
    return f"an all-reduce over NCCL between GPUs of {' and '.join(one.hosts)}"


def _figure(facts: Facts, one: AllReduce) -> Iterator[Finding]:
    rate = one.result["bus_bytes_per_s"]
    if one.result["wrong"]:
        yield problem(Cause.GPU, one.hosts, f"{_name(one)} computes wrong sums", _WITHOUT_P2P)
    elif len(one.hosts) == 1 and _has_nvlink(facts, one.hosts[0]) and rate < PCIE:
        yield warning(
            Cause.GPU, one.hosts,
            f"{_name(one)}, which NVLink connects, moves {rate / 1e9:.2g} GB/s ({one.transports}), less than PCIe does",
            "`nvidia-smi nvlink --status`, and see that no other job is on these GPUs",
        )  # fmt: skip


def _failure(one: AllReduce) -> Finding:
    error = first_error(one)
    if one.was_killed and not error:
        remedy = _WITHOUT_P2P if len(one.hosts) == 1 else f"NCCL takes ports that the kernel gives; {_BY_HAND}"
        return problem(Cause.GPU, one.hosts, f"{_name(one)} has not ended in {one.limit_s:.0f} s", remedy)
    lines = [line.strip() for output in one.outputs for line in output.splitlines() if line.strip()]
    error = error or (lines[-1] if lines else "it prints nothing")
    return problem(Cause.GPU, one.hosts, f"{_name(one)} fails: {error}", _BY_HAND)


def first_error(one: AllReduce) -> str:
    """Return NCCL's first warning, else the first error of a rank; empty without one.

    What a rank says about the end of another one counts only where nothing else is said.
    """
    lines = [line.strip() for output in one.outputs for line in output.splitlines()]
    causes = [line for line in lines if not _CONSEQUENCE.search(line)]
    for pattern, some in ((_WARNING, causes), (_ERROR, causes), (_WARNING, lines), (_ERROR, lines)):
        for line in some:
            if match := pattern.search(line):
                return match[1] if match.groups() else match[0]
    return ""


def _has_nvlink(facts: Facts, name: str) -> bool:
    return read_matrix(facts.gpus[name]["topology"]).get(("GPU0", "GPU1"), "").startswith("NV")

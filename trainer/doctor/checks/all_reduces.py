"""What an all-reduce between two GPUs says: whether it ends, whether it is right, and how fast it is."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainer.doctor.checks.links import read_matrix
from trainer.doctor.facts import AllReduce, Facts
from trainer.doctor.finding import Cause, Finding, problem, warning

PCIE = 12e9
"""Bytes a second through 16 lanes of PCIe 3.0. NVLink gives several times as many."""
_WARNING = re.compile(r"NCCL WARN (.+)")
_ERROR = re.compile(r"[\w.]*(?:Error|Exception): .+|[\w.]+Error$")
_CONSEQUENCE = re.compile(r"[Cc]onnection (?:closed|reset) by|[Rr]emote process exited")
_WITHOUT_P2P = (
    "where it works with NCCL_P2P_DISABLE=1 before the command, P2P is at fault: IOMMU or ACS, in the firmware"
)
_BY_HAND = "`NCCL_DEBUG=INFO` before the job's command shows the rest"


def check_all_reduces(facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong with the all-reduces that were tried."""
    for one in facts.all_reduces:
        within = len(one.hosts) == 1
        what = f"an all-reduce over NCCL between GPU 0 and 1 of {one.hosts[0]}" if within else (
            f"an all-reduce over NCCL between GPUs of {' and '.join(one.hosts)}"
        )  # fmt: skip
        result = one.result
        if result.get("wrong"):
            yield problem(Cause.GPU, one.hosts, f"{what} computes wrong sums", _WITHOUT_P2P)
        elif not result and one.was_killed:
            yield problem(
                Cause.GPU, one.hosts, f"{what} has not ended in {one.limit_s:.0f} s",
                _WITHOUT_P2P if within else "NCCL takes ports that the kernel gives; " + _BY_HAND,
            )  # fmt: skip
        elif not result:
            yield problem(Cause.GPU, one.hosts, f"{what} fails: {first_error(one)}", _BY_HAND)
        elif within and _has_nvlink(facts, one.hosts[0]) and result["bus_bytes_per_s"] < PCIE:
            yield warning(
                Cause.GPU, one.hosts,
                f"{what}, which NVLink connects, moves {result['bus_bytes_per_s'] / 1e9:.2g} GB/s ({one.transports}), "
                "less than PCIe does", "`nvidia-smi nvlink --status`, and see that no other job is on these GPUs",
            )  # fmt: skip


def first_error(one: AllReduce) -> str:
    """Return NCCL's first warning, else the first error of a rank, else the last line that a rank has printed.

    What a rank says about the end of another one counts only where nothing else is said.
    """
    lines = [line.strip() for output in one.outputs for line in output.splitlines() if line.strip()]
    causes = [line for line in lines if not _CONSEQUENCE.search(line)]
    for pattern, some in ((_WARNING, causes), (_ERROR, causes), (_WARNING, lines), (_ERROR, lines)):
        for line in some:
            if match := pattern.search(line):
                return match[1] if match.groups() else match[0]
    return lines[-1] if lines else "it prints nothing"


def _has_nvlink(facts: Facts, name: str) -> bool:
    return read_matrix(facts.gpus[name]["topology"]).get(("GPU0", "GPU1"), "").startswith("NV")

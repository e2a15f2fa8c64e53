"""GPUs, as nvidia-smi tells of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.ops.doctor.checks.all_reduces import check_all_reduces
from trainer.ops.doctor.checks.links import check_peers, check_rdma
from trainer.ops.doctor.facts import Facts
from trainer.ops.doctor.finding import Cause, Finding, Level, problem, warning
from trainer.ops.supervise.hosts import Host

# The oldest driver that runs programs of a CUDA's major version (CUDA Toolkit release notes, minor version
# compatibility).
_LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}


@dataclass(frozen=True)
class Gpu:
    """A line of nvidia-smi's query."""

    index: str
    name: str
    driver: str
    persistence: str
    ecc_errors: str
    is_hot: bool
    is_power_braked: bool
    bus_id: str


def read_query(text: str) -> list[Gpu]:
    """Return the GPUs of `nvidia-smi --query-gpu=… --format=csv,noheader,nounits`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [
        Gpu(index, name, driver, persistence, ecc_errors, hot == "Active", braked == "Active", bus_id)
        for index, name, driver, persistence, ecc_errors, hot, braked, bus_id in (row for row in rows if len(row) == 8)
    ]


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong with the GPUs of the hosts where they were looked at."""
    found = [finding for host in facts.answering if host.name in facts.gpus for finding in _of_host(facts, host)]
    yield from found
    yield from check_all_reduces(facts, [name for one in found if one.level is Level.PROBLEM for name in one.hosts])


def _of_host(facts: Facts, host: Host) -> Iterator[Finding]:
    found = facts.gpus[host.name]
    gpus = read_query(found["query"])
    cuda = facts.software.get(host.name, {}).get("versions", {}).get("CUDA", "")
    yield from _present(host, gpus, cuda)
    for gpu in gpus:
        yield from _state(host, gpu)
    yield from check_peers(host, found)
    yield from check_rdma(host, found, facts.machines[host.name]["has_rdma"])


def _present(host: Host, gpus: list[Gpu], cuda: str) -> Iterator[Finding]:
    if len(gpus) < host.slots:
        yield problem(
            Cause.GPU, (host.name,), f"{host.name} has {len(gpus)} of the {host.slots} GPUs that its ranks need",
            f"name fewer slots (-H {host.name}:{max(1, len(gpus))}), or give the container its GPUs (--gpus all)"
            if gpus else "`nvidia-smi` there has to list a GPU; a container needs --gpus all",
        )  # fmt: skip
    if gpus and not cuda:
        yield problem(
            Cause.GPU, (host.name,), f"PyTorch on {host.name} was built without CUDA", "install PyTorch's CUDA wheels"
        )
    least = _LEAST_DRIVER.get(cuda.partition(".")[0], 0)
    major = gpus[0].driver.partition(".")[0] if gpus else ""
    if major.isdecimal() and int(major) < least:
        yield problem(
            Cause.GPU, (host.name,),
            f"the driver of {host.name}, {gpus[0].driver}, is too old for PyTorch's CUDA {cuda}",
            f"install driver {least} or newer, or PyTorch for an older CUDA",
        )  # fmt: skip


def _state(host: Host, gpu: Gpu) -> Iterator[Finding]:
    name = f"GPU {gpu.index} ({gpu.name}) of {host.name}"
    if gpu.ecc_errors.isdecimal() and int(gpu.ecc_errors) > 0:
        yield problem(
            Cause.GPU, (host.name,), f"{name} has {gpu.ecc_errors} uncorrected memory errors",
            f"`sudo nvidia-smi --gpu-reset -i {gpu.index}` with no job on it; where they come again, replace it",
        )  # fmt: skip
    if gpu.is_hot or gpu.is_power_braked:
        why = "temperature" if gpu.is_hot else "power supply"
        yield warning(
            Cause.GPU, (host.name,), f"{name} is slowed down because of its {why}",
            f"`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {gpu.index}`",
        )  # fmt: skip
    if gpu.persistence == "Disabled":
        yield warning(
            Cause.GPU, (host.name,), f"persistence mode is off for {name}, so that each first use takes seconds",
            "`sudo nvidia-smi -pm 1`",
        )  # fmt: skip

"""GPUs, as nvidia-smi tells of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainer.doctor.facts import Facts
from trainer.doctor.finding import Cause, Finding, problem, warning
from trainer.supervise.hosts import Host

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


def read_query(text: str) -> list[Gpu]:
    """Return the GPUs of `nvidia-smi --query-gpu=… --format=csv,noheader,nounits`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [
        Gpu(index, name, driver, persistence, ecc_errors, hot == "Active", braked == "Active")
        for index, name, driver, persistence, ecc_errors, hot, braked in (row for row in rows if len(row) == 7)
    ]


def read_topology(text: str) -> dict[tuple[str, str], str]:
    """Return how each GPU is connected with each other GPU and adapter, from `nvidia-smi topo -m`."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split("\t") for line in text.splitlines()]
    head = next(([cell.strip() for cell in line] for line in lines if "GPU0" in [one.strip() for one in line]), [])
    links: dict[tuple[str, str], str] = {}
    for cells in ([cell.strip() for cell in line] for line in lines):
        if re.fullmatch(r"GPU\d+", cells[0]):
            for title, link in zip(head[1:], cells[1:], strict=False):
                if re.fullmatch(r"GPU\d+|NIC\d+|mlx5_\d+", title) and link != "X":
                    links[cells[0], title] = link
    return links


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong with the GPUs of the hosts where they were looked at."""
    for host in facts.answering:
        if host.name in facts.gpus:
            found = facts.gpus[host.name]
            gpus = read_query(found["query"])
            cuda = facts.software.get(host.name, {}).get("versions", {}).get("CUDA", "")
            yield from _present(host, gpus, cuda)
            for gpu in gpus:
                yield from _state(host, gpu)
            yield from _links(host, read_topology(found["topology"]), found, facts.machines[host.name]["has_rdma"])


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


def _links(
    host: Host, links: Mapping[tuple[str, str], str], found: Mapping[str, str], has_rdma: bool
) -> Iterator[Finding]:
    far = sorted({gpu for (gpu, other), link in links.items() if other.startswith("GPU") and link == "SYS"})
    if far:
        yield warning(
            Cause.GPU, (host.name,), f"{host.name} has GPUs on different sockets ({', '.join(far)}), so that what "
            "they exchange goes through both processors", "`nvidia-smi topo -m`; give a job the GPUs of one socket",
        )  # fmt: skip
    if has_rdma and links and not found["peer_memory"]:
        yield warning(
            Cause.GPU, (host.name,), f"{host.name} has RDMA adapters and no nvidia_peermem, so that what GPUs send to "
            "other hosts is copied through host memory", "`sudo modprobe nvidia_peermem`",
        )  # fmt: skip
    adapters = {other for _, other in links if not other.startswith("GPU")}
    distant = sorted({gpu for gpu, _ in links if adapters and all(links.get((gpu, one)) == "SYS" for one in adapters)})
    if distant:
        yield warning(
            Cause.GPU, (host.name,), f"{host.name} has GPUs on another socket than every adapter: {', '.join(distant)}",
            "`nvidia-smi topo -m`; GPUDirect RDMA wants PIX or PXB",
        )  # fmt: skip

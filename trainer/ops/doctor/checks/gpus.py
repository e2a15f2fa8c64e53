"""GPUs: the state of each, the connections between them and to the network, and the result of an all-reduce."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from trainer.ops.doctor.agent.gpus import address_of
from trainer.ops.doctor.facts import AllReduce, Facts
from trainer.ops.doctor.finding import About, Cause, Finding, Level
from trainer.ops.supervise.hosts import Host

# The oldest driver that runs programs of a CUDA's major version (CUDA Toolkit release notes, minor version
# compatibility).
_LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}
PCIE = 12e9
"""Bytes a second through 16 lanes of PCIe 3.0. NVLink gives several times as many."""


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong with the GPUs of the hosts where they were looked at."""
    broken: set[str] = set()
    for host in facts.answering:
        if host.name in facts.gpus:
            for finding in _of_host(facts, host, facts.gpus[host.name]):
                yield finding
                if finding.level is Level.PROBLEM:
                    broken.add(host.name)
    for tried in facts.all_reduces:
        if tried.result:
            yield from _figure(facts, tried)
        elif broken.isdisjoint(tried.hosts):  # else it is explained already
            yield _failure(tried)


def _of_host(facts: Facts, host: Host, answer: Mapping[str, Any]) -> Iterator[Finding]:
    about = About(Cause.GPU, host.name)
    gpus = read_query(answer["query"])
    yield from _present(about, host, gpus, facts.versions(host.name).get("CUDA", ""))
    for gpu in gpus:
        yield from _state(about, host, gpu)
    yield from _peers(about, host, answer)
    yield from _rdma(about, host, answer, has_rdma=facts.machines[host.name]["has_rdma"])


# Each by itself


class Gpu(NamedTuple):
    """A line of nvidia-smi's query, as it prints it."""

    number: str
    name: str
    driver: str
    persistence: str
    ecc_errors: str
    hot: str
    power_braked: str
    bus_id: str


def read_query(text: str) -> list[Gpu]:
    """Return the GPUs of `nvidia-smi --query-gpu=… --format=csv,noheader,nounits`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [Gpu(*row) for row in rows if len(row) == len(Gpu._fields)]


def _present(about: About, host: Host, gpus: list[Gpu], cuda: str) -> Iterator[Finding]:
    name = host.name
    if len(gpus) < host.slots:
        fewer = f"name fewer slots (-H {name}:{len(gpus)}), or give the container its GPUs (--gpus all)"
        none = "`nvidia-smi` there has to list a GPU; a container needs --gpus all"
        text = f"{name} has {len(gpus)} of the {host.slots} GPUs that its ranks need"
        yield about.problem(text, fewer if gpus else none)
    if gpus and not cuda:
        yield about.problem(f"PyTorch on {name} was built without CUDA", "install PyTorch's CUDA wheels")
    least = _LEAST_DRIVER.get(cuda.partition(".")[0], 0)
    major = gpus[0].driver.partition(".")[0] if gpus else ""
    if major.isdecimal() and int(major) < least:
        yield about.problem(
            f"the driver of {name}, {gpus[0].driver}, is too old for PyTorch's CUDA {cuda}",
            f"install driver {least} or newer, or PyTorch for an older CUDA",
        )


def _state(about: About, host: Host, gpu: Gpu) -> Iterator[Finding]:
    name = f"GPU {gpu.number} ({gpu.name}) of {host.name}"
    if gpu.ecc_errors.isdecimal() and int(gpu.ecc_errors) > 0:
        yield about.problem(
            f"{name} has {gpu.ecc_errors} uncorrected memory errors",
            f"`sudo nvidia-smi --gpu-reset -i {gpu.number}` with no job on it; where they come again, replace it",
        )
    if "Active" in (gpu.hot, gpu.power_braked):
        yield about.warning(
            f"{name} is slowed down because of its {'temperature' if gpu.hot == 'Active' else 'power supply'}",
            f"`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {gpu.number}`",
        )
    if gpu.persistence == "Disabled":
        text = f"persistence mode is off for {name}, so that each first use takes seconds"
        yield about.warning(text, "`sudo nvidia-smi -pm 1`")


# How they reach one another (P2P), and the network adapters (GPUDirect RDMA)

_ROWS = re.compile(r"\t| {2,}")


def read_matrix(text: str) -> dict[tuple[str, str], str]:
    """Return each GPU's entries of `nvidia-smi topo -m` or `topo -p2p r`, those of network adapters among them."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [[cell.strip() for cell in _ROWS.split(line.rstrip())] for line in plain.splitlines()]
    head = next((line for line in lines if "GPU0" in line[:2]), [])
    links: dict[tuple[str, str], str] = {}
    for cells in lines:
        row, *rest = cells if cells[0] else cells[1:] or [""]
        if re.fullmatch(r"GPU\d+", row) and cells is not head:
            for title, link in zip(head[head.index("GPU0") :], rest, strict=False):
                if re.fullmatch(r"GPU\d+|NIC\d+|mlx5_\d+", title) and link != "X":
                    links[row, title] = link
    return links


def read_redirecting(lspci: str) -> frozenset[str]:
    """Return the devices whose ACS sends what their neighbours exchange up to the root, from `lspci -D -vvv`."""
    devices, address = set(), ""
    for line in lspci.splitlines():
        if not line.startswith(("\t", " ")):
            address = line.partition(" ")[0]
        elif "ACSCtl:" in line and "ReqRedir+" in line:
            devices.add(address)
    return frozenset(devices)


@dataclass(frozen=True)
class _Way:
    """What is known of the way between two GPUs of a host."""

    gpus: tuple[str, str]
    link: str
    """As `topo -m` says, as in NV18, PIX or SYS."""
    status: str
    """As `topo -p2p r` says; "OK" where it says nothing."""
    translated: bool
    """Whether the IOMMU translates the addresses that they use."""
    redirecting: list[str]
    """Bridges between them, below the one that they share, which send everything up to the root."""


def _ways(answer: Mapping[str, Any]) -> Iterator[_Way]:
    links, peers = read_matrix(answer["topology"]), read_matrix(answer["p2p"])
    places = [answer["pci"].get(address_of(line), {}) for line in answer["query"].splitlines()]
    redirecting = read_redirecting(answer["acs"])
    for first, second in combinations(range(len(places)), 2):
        gpus = f"GPU{first}", f"GPU{second}"
        if gpus not in links:
            continue
        above, other = (places[gpu].get("bridges", []) for gpu in (first, second))
        shared = set(above) & set(other)
        between = [bridge for bridge in [*above, *other] if bridge not in shared] if len(shared) > 1 else []
        translated = all(places[gpu].get("iommu", "").startswith("DMA") for gpu in (first, second))
        redirected = [bridge for bridge in between if bridge in redirecting]
        yield _Way(gpus, links[gpus], peers.get(gpus, "OK"), translated, redirected)


def _peers(about: About, host: Host, answer: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what keeps GPUs of a host from reading each other's memory directly, a finding for each reason."""
    if answer["environment"].get("NCCL_P2P_DISABLE", "0") != "0":
        yield about.warning(
            f"NCCL_P2P_DISABLE is set on {host.name}, so that its GPUs exchange through the host's memory",
            "`unset NCCL_P2P_DISABLE`, unless jobs hang or compute wrong sums without it",
        )
        return
    by_reason: dict[tuple[str, str], set[str]] = {}
    for way in _ways(answer):
        if reason := _reason(way):
            by_reason.setdefault(reason, set()).update(way.gpus)
    for (text, remedy), gpus in by_reason.items():
        names = ", ".join(sorted(gpus, key=lambda name: int(name[3:])))
        yield about.warning(text.format(gpus=names, host=host.name), remedy)


_IOMMU = "`iommu=pt` on the kernel's command line, or the IOMMU (VT-d, AMD-Vi) off in the firmware"
_MOVE = "`nvidia-smi topo -m`; move them to slots of one PCIe switch"
# What `nvidia-smi topo -p2p r` says where nothing else explains it.
_STATUS = {
    "GNS": ("their model has no P2P", "NCCL takes host memory by itself; expect less speed from more of these GPUs"),
    "CNS": (
        "the driver has no P2P for this chipset or this model of GPU",
        "look for IOMMU and ACS in the firmware; for consumer GPUs there is no remedy, and NCCL takes host memory",
    ),
    "TNS": ("there is no P2P on the way between them", _MOVE),
    "DR": (
        "an option of the driver has P2P off",
        "`grep -r NVreg /etc/modprobe.d`, and remove the one that disables peer mappings",
    ),
}


def _reason(way: _Way) -> tuple[str, str] | None:
    """Return finding and remedy for a way, with {gpus} and {host} to be filled in; None where P2P works well."""
    is_possible, is_nvlink = way.status == "OK", way.link.startswith("NV")
    if way.link == "SYS":
        text = "{host} has GPUs on different sockets ({gpus}), so that what they exchange goes through both processors"
        memory = "" if is_possible else ", and the host's memory"
        return text + memory, "`nvidia-smi topo -m`; give a job the GPUs of one socket"
    by_way = "by way of the processor, which is slow or hangs" if is_possible else "through the host's memory"
    how = f"{{gpus}} of {{host}} exchange {by_way}: "
    if way.translated and not is_nvlink:
        return how + "the IOMMU translates what they send", _IOMMU
    if way.redirecting and not is_nvlink:
        return (
            how + f"ACS is on in the bridges between them ({', '.join(way.redirecting)})",
            f"ACS off in the firmware, or `sudo setpci -s {way.redirecting[0]} ECAP_ACS+0x6.w=0000` for each of them "
            "after every start",
        )
    if is_possible:
        return None
    if way.link == "NODE":
        return how + "they are below different PCIe roots", _MOVE
    text, remedy = _STATUS.get(way.status, (f"the driver gives no reason ({way.status})", "install a newer driver"))
    return how + text, remedy


_FAR = {"PHB": "on another PCIe switch", "NODE": "below another PCIe root", "SYS": "on another socket"}
_ADAPTER_LINKS = ["PIX", "PXB", *_FAR]
"""How a GPU reaches a network adapter, the nearest first."""
_LEAST_KERNEL_FOR_DMA_BUF = (5, 12)


def _rdma(about: About, host: Host, answer: Mapping[str, Any], *, has_rdma: bool) -> Iterator[Finding]:
    """Yield what keeps network adapters from reading the GPUs' memory directly (GPUDirect RDMA)."""
    name, environment, links = host.name, answer["environment"], read_matrix(answer["topology"])
    if has_rdma and environment.get("NCCL_IB_DISABLE", "0") != "0":
        text = f"NCCL_IB_DISABLE is set on {name}, so that NCCL takes TCP between hosts"
        yield about.warning(text, "`unset NCCL_IB_DISABLE`")
        return
    if has_rdma and links and not (answer["peer_memory"] or has_dma_buf(answer)):
        yield about.warning(
            f"{name} has RDMA adapters and no nvidia_peermem, so that what GPUs send to other hosts is copied through "
            "host memory",
            "`sudo modprobe nvidia_peermem`, or the driver's open kernel modules, which have DMA-BUF",
        )
    nearest = _nearest(links)
    for place, where in _FAR.items():
        remedy = "`nvidia-smi topo -m`; GPUDirect RDMA wants PIX or PXB"
        if place == "PHB":
            if environment.get("NCCL_NET_GDR_LEVEL", "") in ("PHB", "SYS"):
                continue
            remedy += ", and NCCL takes it here with NCCL_NET_GDR_LEVEL=PHB alone, as in virtual machines"
        if gpus := [gpu for gpu, best in nearest.items() if best == place]:
            yield about.warning(f"{name} has GPUs {where} than every adapter: {', '.join(gpus)}", remedy)


def _nearest(links: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """Return how the nearest adapter of each GPU is connected, where there is an adapter."""
    nearest: dict[str, str] = {}
    for (gpu, other), link in sorted(links.items(), key=lambda entry: int(entry[0][0][3:])):
        if not other.startswith("GPU") and link in _ADAPTER_LINKS:
            nearest[gpu] = min(nearest.get(gpu, link), link, key=_ADAPTER_LINKS.index)
    return nearest


def has_dma_buf(answer: Mapping[str, Any]) -> bool:
    """Return whether driver and kernel let adapters read the GPUs' memory without nvidia_peermem."""
    release = re.match(r"(\d+)\.(\d+)", answer["kernel"])
    version = (int(release[1]), int(release[2])) if release else (0, 0)
    return "Open Kernel Module" in answer["driver"] and version >= _LEAST_KERNEL_FOR_DMA_BUF


# The all-reduces that were tried: whether each ends, whether it is right, and how fast it is

_WARNING = re.compile(r"NCCL WARN (.+)")
_ERROR = re.compile(r"([\w.]*(?:Error|Exception): .+|[\w.]+Error$)")
_CONSEQUENCE = re.compile(r"[Cc]onnection (?:closed|reset) by|[Rr]emote process exited")
_WITHOUT_P2P = (
    "where it works with NCCL_P2P_DISABLE=1 before the command, P2P is at fault: IOMMU or ACS, in the firmware"
)
_BY_HAND = "`NCCL_DEBUG=INFO` before the job's command shows the rest"


def _title(tried: AllReduce) -> str:
    within, *others = tried.hosts
    where = f"GPUs of {' and '.join(tried.hosts)}" if others else f"GPU 0 and 1 of {within}"
    return f"an all-reduce over NCCL between {where}"


def _figure(facts: Facts, tried: AllReduce) -> Iterator[Finding]:
    about, rate = About(Cause.GPU, *tried.hosts), tried.result["bus_bytes_per_s"]
    if tried.result["wrong"]:
        yield about.problem(f"{_title(tried)} computes wrong sums", _WITHOUT_P2P)
    elif len(tried.hosts) == 1 and rate < PCIE:
        link = read_matrix(facts.gpus[tried.hosts[0]]["topology"]).get(("GPU0", "GPU1"), "")
        if link.startswith("NV"):
            yield about.warning(
                f"{_title(tried)}, which NVLink connects, moves {rate / 1e9:.2g} GB/s ({tried.transports}), less than "
                "PCIe does",
                "`nvidia-smi nvlink --status`, and see that no other job is on these GPUs",
            )


def _failure(tried: AllReduce) -> Finding:
    about, error = About(Cause.GPU, *tried.hosts), first_error(tried)
    if tried.was_killed and not error:
        between = f"NCCL takes ports that the kernel gives; {_BY_HAND}"
        text = f"{_title(tried)} has not ended in {tried.limit_s:.0f} s"
        return about.problem(text, _WITHOUT_P2P if len(tried.hosts) == 1 else between)
    error = error or (tried.lines[-1] if tried.lines else "it prints nothing")
    return about.problem(f"{_title(tried)} fails: {error}", _BY_HAND)


def first_error(tried: AllReduce) -> str:
    """Return NCCL's first warning, else the first error of a rank; empty without one.

    What a rank says about the end of another one counts only where nothing else is said.
    """
    causes = [line for line in tried.lines if not _CONSEQUENCE.search(line)]
    for lines in (causes, tried.lines):
        for pattern in (_WARNING, _ERROR):
            if match := next(filter(None, map(pattern.search, lines)), None):
                return match[1]
    return ""

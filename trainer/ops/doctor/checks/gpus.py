"""GPUs: the state of each, the connections between them and to the network, and the result of an all-reduce."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from trainer.ops.doctor.agent.gpus import address_of
from trainer.ops.doctor.facts import AllReduce, Facts, HostFacts
from trainer.ops.doctor.finding import About, Cause, Finding, Level

# The oldest driver that runs programs of a CUDA's major version (CUDA Toolkit release notes, minor version
# compatibility).
_LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}
PCIE = 12e9
"""Bytes a second through 16 lanes of PCIe 3.0. NVLink gives several times as many."""

Links = dict[tuple[str, str], str]
"""links["GPU0", "GPU1"]: how nvidia-smi says that they are connected, as in "NV18"."""


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong with the GPUs of the hosts where they were looked at."""
    findings = [finding for host in facts.answering if host.gpus for finding in _of_host(host)]
    yield from findings
    broken = {host for finding in findings if finding.level is Level.PROBLEM for host in finding.hosts}
    topologies = {host.name: host.gpus.get("topology", "") for host in facts.hosts}
    for tried in facts.all_reduces:
        if tried.result:
            yield from _figure(tried, topologies[tried.hosts[0]])
        elif broken.isdisjoint(tried.hosts):  # else it is explained already
            yield _failure(tried)


def _of_host(host: HostFacts) -> Iterator[Finding]:
    about, gpus, links = About(Cause.GPU, host), read_query(host.gpus["query"]), read_matrix(host.gpus["topology"])
    yield from _present(about, host, gpus)
    for gpu in gpus:
        yield from _state(about, f"GPU {gpu.number} ({gpu.name}) of {host}", gpu)
    yield from _peers(about, host, gpus, links)
    yield from _rdma(about, host, links)


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


def _present(about: About, host: HostFacts, gpus: list[Gpu]) -> Iterator[Finding]:
    cuda = host.versions.get("CUDA", "")
    if len(gpus) < host.slots:
        fewer = f"name fewer slots (-H {host}:{len(gpus)}), or give the container its GPUs (--gpus all)"
        none = "`nvidia-smi` there has to list a GPU; a container needs --gpus all"
        text = f"{host} has {len(gpus)} of the {host.slots} GPUs that its ranks need"
        yield about.problem(text, fewer if gpus else none)
    if gpus and not cuda:
        yield about.problem(f"PyTorch on {host} was built without CUDA", "install PyTorch's CUDA wheels")
    least = _LEAST_DRIVER.get(cuda.partition(".")[0], 0)
    major = gpus[0].driver.partition(".")[0] if gpus else ""
    if major.isdecimal() and int(major) < least:
        text = f"the driver of {host}, {gpus[0].driver}, is too old for PyTorch's CUDA {cuda}"
        yield about.problem(text, f"install driver {least} or newer, or PyTorch for an older CUDA")


def _state(about: About, name: str, gpu: Gpu) -> Iterator[Finding]:
    if gpu.ecc_errors.isdecimal() and int(gpu.ecc_errors) > 0:
        yield about.problem(
            f"{name} has {gpu.ecc_errors} uncorrected memory errors",
            f"`sudo nvidia-smi --gpu-reset -i {gpu.number}` with no job on it; where they come again, replace it",
        )
    if "Active" in (gpu.hot, gpu.power_braked):
        text = f"{name} is slowed down because of its {'temperature' if gpu.hot == 'Active' else 'power supply'}"
        yield about.warning(text, f"`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {gpu.number}`")
    if gpu.persistence == "Disabled":
        text = f"persistence mode is off for {name}, so that each first use takes seconds"
        yield about.warning(text, "`sudo nvidia-smi -pm 1`")


# How they reach one another (P2P), and the network adapters (GPUDirect RDMA)

_ROWS = re.compile(r"\t| {2,}")


def read_matrix(text: str) -> Links:
    """Return each GPU's entries of `nvidia-smi topo -m` or `topo -p2p r`, those of network adapters among them."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [[cell.strip() for cell in _ROWS.split(line.rstrip())] for line in plain.splitlines()]
    head = next((line for line in lines if "GPU0" in line[:2]), [])
    links: Links = {}
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


def _peers(about: About, host: HostFacts, gpus: list[Gpu], links: Links) -> Iterator[Finding]:
    """Yield what keeps GPUs of a host from reading each other's memory directly, a finding for each reason."""
    if host.gpus["environment"].get("NCCL_P2P_DISABLE", "0") != "0":
        yield about.warning(
            f"NCCL_P2P_DISABLE is set on {host}, so that its GPUs exchange through the host's memory",
            "`unset NCCL_P2P_DISABLE`, unless jobs hang or compute wrong sums without it",
        )
        return
    statuses, redirecting = read_matrix(host.gpus["p2p"]), read_redirecting(host.gpus["acs"])
    places = {f"GPU{gpu.number}": host.gpus["pci"].get(address_of(gpu.bus_id), {}) for gpu in gpus}
    by_reason: dict[tuple[str, str], list[str]] = {}
    for pair in combinations(places, 2):
        if link := links.get(pair):
            reason = _reason(link, statuses.get(pair, "OK"), [places[gpu] for gpu in pair], redirecting)
            if reason:
                by_reason.setdefault(reason, []).extend(pair)
    for (text, remedy), names in by_reason.items():
        concerned = ", ".join(gpu for gpu in places if gpu in names)
        yield about.warning(text.format(gpus=concerned, host=host.name), remedy)


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


def _reason(
    link: str, status: str, ends: Sequence[Mapping[str, Any]], redirecting: frozenset[str]
) -> tuple[str, str] | None:
    """Return the finding, with {gpus} and {host} to be filled in, and its remedy; None where P2P works well.

    Args:
        link: between two GPUs of a host as `topo -m` says, as in NV18, PIX or SYS.
        status: as `topo -p2p r` says; "OK" where it says nothing.
        ends: the entries of the GPUs in "pci".
        redirecting: the bridges whose ACS sends everything up to the root.
    """
    is_possible = status == "OK"
    if link == "SYS":
        text = "{host} has GPUs on different sockets ({gpus}), so that what they exchange goes through both processors"
        memory = "" if is_possible else ", and the host's memory"
        return text + memory, "`nvidia-smi topo -m`; give a job the GPUs of one socket"
    by_way = "by way of the processor, which is slow or hangs" if is_possible else "through the host's memory"
    how = f"{{gpus}} of {{host}} exchange {by_way}: "
    if not link.startswith("NV"):
        if all(end.get("iommu", "").startswith("DMA") for end in ends):
            return how + "the IOMMU translates what they send", _IOMMU
        if bridges := [bridge for bridge in _between(ends) if bridge in redirecting]:
            text = f"ACS is on in the bridges between them ({', '.join(bridges)})"
            command = f"`sudo setpci -s {bridges[0]} ECAP_ACS+0x6.w=0000` for each of them after every start"
            return how + text, f"ACS off in the firmware, or {command}"
    if is_possible:
        return None
    if link == "NODE":
        return how + "they are below different PCIe roots", _MOVE
    text, remedy = _STATUS.get(status, (f"the driver gives no reason ({status})", "install a newer driver"))
    return how + text, remedy


def _between(ends: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the bridges between two GPUs below the bridge that they share; none where they share the root only."""
    first, second = (end.get("bridges", []) for end in ends)
    shared = set(first) & set(second)
    return [bridge for bridge in [*first, *second] if bridge not in shared] if len(shared) > 1 else []


_FAR = {"PHB": "on another PCIe switch", "NODE": "below another PCIe root", "SYS": "on another socket"}
_ADAPTER_LINKS = ["PIX", "PXB", *_FAR]
"""How a GPU reaches a network adapter, the nearest first."""
_LEAST_KERNEL_FOR_DMA_BUF = (5, 12)


def _rdma(about: About, host: HostFacts, links: Links) -> Iterator[Finding]:
    """Yield what keeps network adapters from reading the GPUs' memory directly (GPUDirect RDMA)."""
    environment, has_rdma = host.gpus["environment"], host.machine["has_rdma"]
    if has_rdma and environment.get("NCCL_IB_DISABLE", "0") != "0":
        text = f"NCCL_IB_DISABLE is set on {host}, so that NCCL takes TCP between hosts"
        yield about.warning(text, "`unset NCCL_IB_DISABLE`")
        return
    if has_rdma and links and not (host.gpus["peer_memory"] or has_dma_buf(host.gpus)):
        text = f"{host} has RDMA adapters and no nvidia_peermem, so that what GPUs send to other hosts is copied"
        remedy = "`sudo modprobe nvidia_peermem`, or the driver's open kernel modules, which have DMA-BUF"
        yield about.warning(f"{text} through host memory", remedy)
    nearest = _nearest(links)
    for place, where in _FAR.items():
        remedy = "`nvidia-smi topo -m`; GPUDirect RDMA wants PIX or PXB"
        if place == "PHB":
            if environment.get("NCCL_NET_GDR_LEVEL", "") in ("PHB", "SYS"):
                continue
            remedy += ", and NCCL takes it here with NCCL_NET_GDR_LEVEL=PHB alone, as in virtual machines"
        if gpus := [gpu for gpu, best in nearest.items() if best == place]:
            yield about.warning(f"{host} has GPUs {where} than every adapter: {', '.join(gpus)}", remedy)


def _nearest(links: Links) -> dict[str, str]:
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


def _figure(tried: AllReduce, topology: str) -> Iterator[Finding]:
    about, rate = About(Cause.GPU, *tried.hosts), tried.result["bus_bytes_per_s"]
    if tried.result["wrong"]:
        yield about.problem(f"{_title(tried)} computes wrong sums", _WITHOUT_P2P)
    elif len(tried.hosts) == 1 and rate < PCIE and read_matrix(topology).get(("GPU0", "GPU1"), "").startswith("NV"):
        how = f"moves {rate / 1e9:.2g} GB/s ({tried.transports}), less than PCIe does"
        remedy = "`nvidia-smi nvlink --status`, and see that no other job is on these GPUs"
        yield about.warning(f"{_title(tried)}, which NVLink connects, {how}", remedy)


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

"""How GPUs reach one another and the network adapters: peer to peer copies (P2P), and GPUDirect RDMA."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from trainer.ops.doctor.agent.gpus import address_of
from trainer.ops.doctor.finding import Cause, Finding, warning
from trainer.ops.supervise.hosts import Host

Links = Mapping[tuple[str, str], str]
"""What `nvidia-smi topo` says of a GPU and another device, by their names there."""

_ROWS = re.compile(r"\t| {2,}")
_NEAR = ("PIX", "PXB")
_LEAST_KERNEL_FOR_DMA_BUF = (5, 12)


def read_matrix(text: str) -> dict[tuple[str, str], str]:
    """Return each GPU's entries of `nvidia-smi topo -m` or `topo -p2p r`, those of network adapters among them."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [[cell.strip() for cell in _ROWS.split(line.rstrip())] for line in plain.splitlines()]
    head = next((line for line in lines if "GPU0" in line[:2]), [])
    links: dict[tuple[str, str], str] = {}
    for cells in lines:
        own, *rest = cells if cells[0] else cells[1:] or [""]
        if re.fullmatch(r"GPU\d+", own) and cells is not head:
            for title, link in zip(head[head.index("GPU0") :], rest, strict=False):
                if re.fullmatch(r"GPU\d+|NIC\d+|mlx5_\d+", title) and link != "X":
                    links[own, title] = link
    return links


def read_redirecting(lspci: str) -> frozenset[str]:
    """Return the devices whose ACS sends what their neighbours exchange up to the root, from `lspci -D -vvv`."""
    found, address = set(), ""
    for line in lspci.splitlines():
        if not line.startswith(("\t", " ")):
            address = line.partition(" ")[0]
        elif "ACSCtl:" in line and "ReqRedir+" in line:
            found.add(address)
    return frozenset(found)


@dataclass(frozen=True)
class _Way:
    """What is known of the way between two GPUs of a host."""

    first: str
    second: str
    link: str
    """As `topo -m` says, as in NV18, PIX or SYS."""
    status: str
    """As `topo -p2p r` says; "OK" where it says nothing."""
    translated: bool
    """Whether the IOMMU translates the addresses that they use."""
    redirecting: tuple[str, ...]
    """Bridges between them, below the one that they share, which send everything up to the root."""


def _ways(found: Mapping[str, Any]) -> Iterator[_Way]:
    links, peers = read_matrix(found["topology"]), read_matrix(found["p2p"])
    addresses = [address_of(line) for line in found["query"].splitlines()]
    redirecting = read_redirecting(found["acs"])
    for first, second in combinations(range(len(addresses)), 2):
        pair = f"GPU{first}", f"GPU{second}"
        if pair not in links:
            continue
        places = [found["pci"].get(addresses[one], {}) for one in (first, second)]
        bridges = [place.get("bridges", []) for place in places]
        shared = {one for one in bridges[0] if one in bridges[1]}
        between = [one for way in bridges for one in way if one not in shared] if len(shared) > 1 else []
        translated = all(place.get("iommu", "").startswith("DMA") for place in places)
        redirected = tuple(one for one in between if one in redirecting)
        yield _Way(*pair, links[pair], peers.get(pair, "OK"), translated, redirected)


def check_peers(host: Host, found: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what keeps GPUs of a host from reading each other's memory directly, a finding for each reason."""
    if found["environment"].get("NCCL_P2P_DISABLE", "0") != "0":
        yield warning(
            Cause.GPU, (host.name,),
            f"NCCL_P2P_DISABLE is set on {host.name}, so that its GPUs exchange through the host's memory",
            "`unset NCCL_P2P_DISABLE`, unless jobs hang or compute wrong sums without it",
        )  # fmt: skip
        return
    by_reason: dict[tuple[str, str], set[str]] = {}
    for way in _ways(found):
        if reason := _reason(way):
            by_reason.setdefault(reason, set()).update((way.first, way.second))
    for (text, remedy), gpus in by_reason.items():
        names = ", ".join(sorted(gpus, key=lambda name: int(name[3:])))
        yield warning(Cause.GPU, (host.name,), text.format(gpus=names, host=host.name), remedy)


_IOMMU = "`iommu=pt` on the kernel's command line, or the IOMMU (VT-d, AMD-Vi) off in the firmware"
# What `nvidia-smi topo -p2p r` says where nothing else explains it.
_STATUS = {
    "GNS": ("their model has no P2P", "NCCL takes host memory by itself; expect less speed from more of these GPUs"),
    "CNS": (
        "the driver has no P2P for this chipset or this model of GPU",
        "look for IOMMU and ACS in the firmware; for consumer GPUs there is no remedy, and NCCL takes host memory",
    ),
    "TNS": ("there is no P2P on the way between them", "`nvidia-smi topo -m`; move them to slots of one PCIe switch"),
    "DR": (
        "an option of the driver has P2P off",
        "`grep -r NVreg /etc/modprobe.d`, and remove the one that disables peer mappings",
    ),
}


def _reason(way: _Way) -> tuple[str, str] | None:
    """Return finding and remedy for a way, with {gpus} and {host} to be filled in; None where P2P works well."""
    is_possible, is_nvlink = way.status == "OK", way.link.startswith("NV")
    if way.link == "SYS":
        return (
            "{host} has GPUs on different sockets ({gpus}), so that what they exchange goes through both processors"
            + ("" if is_possible else ", and the host's memory"),
            "`nvidia-smi topo -m`; give a job the GPUs of one socket",
        )
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
        return (
            how + "they are below different PCIe roots",
            "`nvidia-smi topo -m`; move them to slots of one PCIe switch",
        )
    text, remedy = _STATUS.get(way.status, (f"the driver gives no reason ({way.status})", "install a newer driver"))
    return how + text, remedy


def check_rdma(host: Host, found: Mapping[str, Any], has_rdma: bool) -> Iterator[Finding]:
    """Yield what keeps network adapters from reading the GPUs' memory directly (GPUDirect RDMA)."""
    links = read_matrix(found["topology"])
    if has_rdma and found["environment"].get("NCCL_IB_DISABLE", "0") != "0":
        yield warning(
            Cause.GPU, (host.name,), f"NCCL_IB_DISABLE is set on {host.name}, so that NCCL takes TCP between hosts",
            "`unset NCCL_IB_DISABLE`",
        )  # fmt: skip
        return
    if has_rdma and links and not (found["peer_memory"] or has_dma_buf(found)):
        yield warning(
            Cause.GPU, (host.name,), f"{host.name} has RDMA adapters and no nvidia_peermem, so that what GPUs send to "
            "other hosts is copied through host memory", "`sudo modprobe nvidia_peermem`, or the driver's open kernel "
            "modules, which have DMA-BUF",
        )  # fmt: skip
    level = found["environment"].get("NCCL_NET_GDR_LEVEL", "")
    for place, where in _PLACES.items():
        gpus = [gpu for gpu, best in _nearest(links).items() if best == place]
        if gpus and not (place == "PHB" and level in ("PHB", "SYS")):
            yield warning(
                Cause.GPU, (host.name,), f"{host.name} has GPUs {where} than every adapter: {', '.join(gpus)}",
                "`nvidia-smi topo -m`; GPUDirect RDMA wants PIX or PXB" + _LEVEL.get(place, ""),
            )  # fmt: skip


_PLACES = {"PHB": "on another PCIe switch", "NODE": "below another PCIe root", "SYS": "on another socket"}
_LEVEL = {"PHB": ", and NCCL takes it here with NCCL_NET_GDR_LEVEL=PHB alone, as in virtual machines"}


def _nearest(links: Links) -> dict[str, str]:
    """Return how the nearest adapter of each GPU is connected, where there is an adapter."""
    order = [*_NEAR, *_PLACES]
    found: dict[str, str] = {}
    for (gpu, other), link in sorted(links.items(), key=lambda entry: int(entry[0][0][3:])):
        if not other.startswith("GPU") and link in order:
            found[gpu] = min(found.get(gpu, link), link, key=order.index)
    return found


def has_dma_buf(found: Mapping[str, Any]) -> bool:
    """Return whether driver and kernel let adapters read the GPUs' memory without nvidia_peermem."""
    release = re.match(r"(\d+)\.(\d+)", found["kernel"])
    version = (int(release[1]), int(release[2])) if release else (0, 0)
    return "Open Kernel Module" in found["driver"] and version >= _LEAST_KERNEL_FOR_DMA_BUF

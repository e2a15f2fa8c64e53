"""GPU interconnects of this host: the link between each pair of GPUs, and RDMA; for comm_bench.py."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import torch

# As in the legend of `nvidia-smi topo -m`.
_MEANING = {
    "PIX": "PCIe, one bridge",
    "PXB": "PCIe, several bridges",
    "PHB": "PCIe and the CPU's host bridge",
    "NODE": "PCIe, over the host bridges of one NUMA node",
    "SYS": "PCIe and the link between CPUs",
}


def describe_links() -> list[str]:
    """Return one line for each pair of GPUs and one about RDMA; each names its source."""
    pairs = parse_topology(_output(["nvidia-smi", "topo", "-m"]))
    count = torch.cuda.device_count()
    lines = []
    for first in range(count):
        for second in range(first + 1, count):
            direct = torch.cuda.can_device_access_peer(first, second)
            link = pairs.get((first, second), "unknown: nvidia-smi topo -m does not list it")
            lines.append(
                f"GPU {first} and {second}: {link} (nvidia-smi topo -m), peer-to-peer "
                f"{'yes' if direct else 'no'} (cudaDeviceCanAccessPeer)"
            )
    return [*(lines or [f"{count} GPU on this host, so no link between GPUs"]), describe_rdma(Path("/sys"))]


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Return the kind of link between each pair of GPUs, from the output of `nvidia-smi topo -m`."""
    links = {}
    for line in text.splitlines():
        head, *cells = re.sub(r"\x1b\[[\d;]*m", "", line).split()[:64] or [""]
        row = re.fullmatch(r"GPU(\d+)", head)
        if not row or any(cell.startswith("GPU") for cell in cells):
            continue
        for column, cell in enumerate(cells):
            if lanes := re.fullmatch(r"NV(\d+)", cell):
                links[int(row[1]), column] = f"NVLink, {lanes[1]} links"
            elif cell in _MEANING:
                links[int(row[1]), column] = _MEANING[cell]
    return links


def describe_rdma(sys_root: Path) -> str:
    """Describe whether a network adapter can access GPU memory directly (GPUDirect RDMA).

    Args:
        sys_root: where sysfs is mounted.
    """
    adapters = sorted(path.name for path in (sys_root / "class/infiniband").glob("*"))
    if not adapters:
        return f"GPUDirect RDMA: no, there is no adapter in {sys_root}/class/infiniband"
    module = next((name for name in ("nvidia_peermem", "nv_peer_mem") if (sys_root / "module" / name).is_dir()), None)
    if module:
        return f"GPUDirect RDMA: yes, for {', '.join(adapters)} (module {module} is loaded)"
    return (
        f"GPUDirect RDMA: not through a module (neither nvidia_peermem nor nv_peer_mem is loaded); NCCL_DEBUG=INFO "
        f"shows whether NCCL uses DMA-BUF for {', '.join(adapters)}"
    )


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""

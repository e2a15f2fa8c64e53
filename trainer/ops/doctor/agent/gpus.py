"""What an agent reads of GPUs and of the PCIe devices between them. It also runs the small all-reduce on them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from .host import read_text

_FIELDS = (
    "index,name,driver_version,persistence_mode,ecc.errors.uncorrected.volatile.total,"
    "clocks_{0}_reasons.hw_thermal_slowdown,clocks_{0}_reasons.hw_power_brake_slowdown,pci.bus_id"
)
_DEVICES = Path("/sys/bus/pci/devices")
_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_IB_DISABLE", "NCCL_NET_GDR_LEVEL")
_OUTPUT_CHARACTERS = 20000


def gpus() -> dict[str, Any]:
    """Return what nvidia-smi and the kernel say; empty where there is nothing to be read.

    Returns:
        "acs" are the lines of `lspci -vvv` that begin a device or tell ACSCtl, which root alone can read. "pci" has,
        by the device's address in small letters, the addresses of the bridges above it, the root first, and the type
        of its IOMMU group ("DMA", "DMA-FQ", "identity", …; empty without one).
    """
    query = _query("event") or _query("throttle")  # as drivers before 535 call it
    return {
        "query": query,
        "topology": _output("nvidia-smi", "topo", "-m"),
        "p2p": _output("nvidia-smi", "topo", "-p2p", "r"),
        "peer_memory": _output("sh", "-c", "cut -d' ' -f1 /proc/modules | grep -E 'nv(idia_)?_?peer_?mem'"),
        "driver": read_text("/proc/driver/nvidia/version"),
        "kernel": os.uname().release,
        "acs": _output("sh", "-c", "lspci -D -vvv | grep -E '^[0-9a-f]+:|ACSCtl:'"),
        "pci": {address: _way(address) for address in map(address_of, query.splitlines())},
        "environment": {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)},
    }


def _query(reasons: str) -> str:
    return _output("nvidia-smi", f"--query-gpu={_FIELDS.format(reasons)}", "--format=csv,noheader,nounits")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def address_of(line: str) -> str:
    """Return the kernel's name of the PCI device at the end of a line of nvidia-smi, as in 0000:3b:00.0.

    nvidia-smi's own has capitals, and a domain of eight digits.
    """
    domain, _, rest = line.rpartition(",")[2].strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _way(address: str) -> dict[str, Any]:
    place = _DEVICES / address
    # As in /sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0.
    parts = place.resolve().parts if place.exists() else ()
    return {"bridges": list(parts[3:-1]), "iommu": read_text(place / "iommu_group" / "type").strip()}


def free_port(address: str) -> int:
    """Return a port on which nothing listens at this address."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def all_reduce(
    source: str, backend: str, ranks: list[int], size: int, store: str, interface: str, limit_s: float
) -> dict[str, Any]:
    """Run these ranks of an all-reduce with this Python, and wait until they have ended.

    Args:
        source: the program, which is given the backend, its rank, the size, its place among the ranks of this host,
            the store's address and the limit. It ends when its input does, and so with this agent.
        ranks: those of this host; each takes the GPU of its place in this list.
        size: ranks on all hosts together.
        store: "tcp://ADDRESS:PORT" of rank 0; empty where all ranks are here, which then share a file in memory.
        interface: that leads to the other host; empty to let NCCL choose.
        limit_s: after which the ranks are killed.

    Returns:
        "outputs" of the ranks, and whether they were "killed" at the limit.
    """
    environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"}
    environment.pop("NCCL_DEBUG_FILE", None)
    if interface:
        environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    until = time.monotonic() + limit_s
    files = [_file_in_memory() for _ in ranks]
    with _file_in_memory() as shared:
        store = store or f"file:///proc/self/fd/{shared.fileno()}"
        processes = []
        for place, (rank, file) in enumerate(zip(ranks, files)):
            arguments = [backend, str(rank), str(size), str(place), store, str(int(limit_s) + 1)]
            process = subprocess.Popen(
                [sys.executable, "-c", source, *arguments],
                cwd="/",  # without files of the user's, which Python would import in place of a package
                env=environment,
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[shared.fileno()],
            )
            processes.append(process)
        killed = not _wait(processes, until)
    return {"outputs": [_end_of(file) for file in files], "killed": killed}


def _file_in_memory() -> IO[bytes]:
    return os.fdopen(os.memfd_create("trainer-doctor"), "w+b")


def _end_of(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read().decode(errors="replace")[-_OUTPUT_CHARACTERS:]


def _wait(processes: list[subprocess.Popen[bytes]], until: float) -> bool:
    """Wait for the ranks, and kill what is left at the limit; return whether all have ended by themselves.

    Once a rank has failed, the others only wait for it, so they are killed soon after.
    """
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        if any(process.poll() for process in processes):
            until = min(until, time.monotonic() + 2.0)
        time.sleep(0.05)
    has_failed = any(process.poll() for process in processes)
    are_left = [process for process in processes if process.poll() is None]
    for process in processes:
        if process in are_left:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return has_failed or not are_left


OPERATIONS = {"gpus": gpus, "free_port": free_port, "all_reduce": all_reduce}

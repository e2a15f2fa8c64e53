"""What an agent reads of its host: memory, cores, limits, disk and clock."""

from __future__ import annotations

import ctypes
import getpass
import os
import re
import resource
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from .files import read_number, read_text

_CGROUPS = Path("/sys/fs/cgroup")
_MEMORY_FILES = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
"""A cgroup's limit and usage, in version 2 and 1."""
NO_LIMIT = 1 << 60
"""Bytes, where a limit is not set."""


def clock() -> float:
    """Return the seconds since 1970."""
    return time.time()


def machine(folder: str) -> dict[str, Any]:
    """Return what a job's ranks will find on this host.

    Args:
        folder: where the job is started.
    """
    soft_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_lock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "host_name": socket.gethostname(),
        "user": _user(),
        "user_id": os.getuid(),
        "identity": _identity(),
        "shm_free": _free("/dev/shm"),  # noqa: S108 (only looked at)
        "memory_free": _memory_free(),
        "cores": _cores(),
        "open_files": _unlimited(soft_files),
        "locked_memory": _unlimited(soft_lock),
        "has_rdma": any(Path("/dev/infiniband").glob("uverbs*")),
        "folder": folder,
        "folder_exists": Path(folder).is_dir(),
        "outputs": _outputs(folder),
        "reads_memory": _reads_memory(),
        "single_copy_is_off": _single_copy_is_off(),
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _identity() -> str:
    """Return what two agents have in common only where they are on one host: kernel, network and host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "uts"))])  # noqa: PTH115 (3.9)
    except OSError:
        return ""


def _unlimited(value: int) -> int:
    return NO_LIMIT if value == resource.RLIM_INFINITY else value


def _free(path: str) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def _memory_free() -> dict[str, int]:
    """Return the free memory of the machine and of this process's cgroup, in bytes."""
    match = re.search(r"^MemAvailable: *(\d+) kB", read_text("/proc/meminfo"), re.MULTILINE)
    cgroup = NO_LIMIT
    for folder in (*_cgroups(""), *_cgroups("memory")):
        for limit_file, usage_file in _MEMORY_FILES:
            limit, usage = read_number(folder / limit_file), read_number(folder / usage_file)
            if limit is not None and usage is not None and limit < NO_LIMIT:
                cgroup = min(cgroup, limit - usage + _cache(folder))
    return {"machine": int(match.group(1)) * 1024 if match else NO_LIMIT, "cgroup": cgroup}


def _cache(folder: Path) -> int:
    """Return the bytes of a cgroup that the kernel gives up for others: files that it keeps in memory, and caches."""
    values = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
    names = ("inactive_file", "active_file", "slab_reclaimable")
    return sum(int(values.get(f"total_{name}", values.get(name, "0"))) for name in names)


def _cgroups(controller: str) -> list[Path]:
    """Return this process's cgroup and those above it; of version 2 where `controller` is empty."""
    base = _CGROUPS / controller
    folders = [base]  # in a container, the path is often that of the machine, and its own cgroup is the root
    for line in read_text("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            place = base / path.lstrip("/")
            folders += [folder for folder in (place, *place.parents) if base in folder.parents]
    return [folder for folder in folders if folder.is_dir()]


def _cores() -> float:
    cores = float(len(os.sched_getaffinity(0)))
    quotas = [read_text(folder / "cpu.max").split() for folder in _cgroups("")]
    for folder in _cgroups("cpu"):
        quotas.append([read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")])
    for quota in quotas:  # without a limit, it is "max" in version 2 and -1 in version 1
        if len(quota) == 2 and all(map(str.isdecimal, quota)):
            cores = min(cores, int(quota[0]) / int(quota[1]))
    return cores


def _outputs(folder: str) -> dict[str, Any]:
    """Return the folder that checkpoints and records go to by default, its free bytes, and whether it is writable."""
    runs = Path(folder, "runs")
    place = runs if runs.is_dir() else Path(folder)
    return {"path": str(place), "free": _free(str(place)), "is_writable": os.access(str(place), os.W_OK)}


def _reads_memory() -> bool:
    """Return whether process_vm_readv is allowed, which Open MPI copies with; tried on this process itself."""
    source, target = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1)
    # A struct iovec is an address and a length.
    here, there = ((ctypes.c_size_t * 2)(ctypes.addressof(buffer), 1) for buffer in (target, source))
    call = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    return call is not None and call(os.getpid(), here, 1, there, 1, 0) == 1


def _single_copy_is_off() -> bool:
    """Return whether Open MPI has been told not to copy with process_vm_readv."""
    name = "btl_vader_single_copy_mechanism"
    prefix = os.environ.get("OPAL_PREFIX")
    mpirun = shutil.which("mpirun")
    if not prefix and mpirun:
        prefix = str(Path(mpirun).resolve().parent.parent)
    files = [Path.home() / ".openmpi" / "mca-params.conf", Path(prefix or "/usr", "etc", "openmpi-mca-params.conf")]
    pattern = re.compile(rf"^\s*{name}\s*=\s*none\s*(#|$)", re.MULTILINE)
    return os.environ.get(f"OMPI_MCA_{name}") == "none" or any(pattern.search(read_text(file)) for file in files)


OPERATIONS = {"clock": clock, "machine": machine}

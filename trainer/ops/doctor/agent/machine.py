"""What a job's ranks will find on a host: memory, cores, limits and disk."""

from __future__ import annotations

import ctypes
import getpass
import os
import re
import resource
import shutil
import socket
from pathlib import Path
from typing import Any

_CGROUPS = Path("/sys/fs/cgroup")
_MEMORY_FILES = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
"""A cgroup's limit and usage, in version 2 and 1."""
NO_LIMIT = 1 << 60
"""Bytes, where a limit is not set."""


def look(folder: str) -> dict[str, Any]:
    """Return what there is.

    Args:
        folder: where the job is started.
    """
    runs = Path(folder, "runs")  # where checkpoints and records go by default
    outputs = str(runs if runs.is_dir() else Path(folder))
    return {
        "host_name": socket.gethostname(),
        "user": _user(),
        "shm_free": _free("/dev/shm"),  # noqa: S108 (only looked at)
        "memory_free": _memory_free(),
        "cores": _cores(),
        "open_files": _soft_limit(resource.RLIMIT_NOFILE),
        "locked_memory": _soft_limit(resource.RLIMIT_MEMLOCK),
        "has_rdma": any(Path("/dev/infiniband").glob("uverbs*")),
        "folder": folder,
        "folder_exists": Path(folder).is_dir(),
        "outputs": {"path": outputs, "free": _free(outputs), "is_writable": os.access(outputs, os.W_OK)},
        "reads_memory": _reads_memory(),
        "single_copy_is_off": _single_copy_is_off(),
    }


def _read(path: str | Path) -> str:
    """Return what is in a file of the system; empty where it cannot be read, as many are missing on some hosts."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _soft_limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return NO_LIMIT if soft == resource.RLIM_INFINITY else soft


def _free(path: str) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def _memory_free() -> int:
    """Return the memory that the limits of this process's cgroups leave, in bytes."""
    free = NO_LIMIT
    for folder in (*_cgroups(""), *_cgroups("memory")):
        for limit_file, usage_file in _MEMORY_FILES:
            limit, usage = _read(folder / limit_file), _read(folder / usage_file)
            if limit.isdecimal() and usage.isdecimal() and int(limit) < NO_LIMIT:
                free = min(free, int(limit) - int(usage) + _cache(folder))
    return free


def _cache(folder: Path) -> int:
    """Return the bytes of a cgroup that the kernel gives up for others: files that it keeps in memory, and caches."""
    values = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    names = ("inactive_file", "active_file", "slab_reclaimable")
    return sum(int(values.get(f"total_{name}", values.get(name, "0"))) for name in names)


def _cgroups(controller: str) -> list[Path]:
    """Return this process's cgroup and those above it; of version 2 where `controller` is empty."""
    base = _CGROUPS / controller
    folders = [base]  # in a container, the path is often that of the machine, and its own cgroup is the root
    for line in _read("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            place = base / path.lstrip("/")
            folders += [folder for folder in (place, *place.parents) if base in folder.parents]
    return [folder for folder in folders if folder.is_dir()]


def _cores() -> float:
    cores = float(len(os.sched_getaffinity(0)))
    quotas = [_read(folder / "cpu.max").split() for folder in _cgroups("")]
    for folder in _cgroups("cpu"):
        quotas.append([_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")])
    for quota in quotas:  # without a limit, it is "max" in version 2 and -1 in version 1
        if len(quota) == 2 and all(map(str.isdecimal, quota)):
            cores = min(cores, int(quota[0]) / int(quota[1]))
    return cores


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
    return os.environ.get(f"OMPI_MCA_{name}") == "none" or any(pattern.search(_read(file)) for file in files)

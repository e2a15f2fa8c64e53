"""Host-specific defaults for a rank: its threads, its session, and memory that is kept between steps."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
import torch

from trainer.cluster.environment import user_set
from trainer.cluster.launchers import LAUNCHERS
from trainer.cluster.network import machine_id
from trainer.cluster.world import World
from trainer.tuning.session import take_own_session

# From glibc's malloc.h. 32 MiB is the largest threshold that it takes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_BYTES = 32 * 1024 * 1024
_TRIM_THRESHOLD_BYTES = 1024 * 1024 * 1024

_TAKEN: set[int] = set()
"""Numbers of threads that were set here."""


def tune_host(world: World) -> dict[str, str]:
    """Set this rank's share of the cores, its session and glibc's thresholds; return what was set, and why."""
    chosen = {}
    threads = _threads(world)
    if threads is not None:
        _take_threads(threads)
        chosen["threads"] = f"{threads} per rank ({world.local_size} ranks on {host_cores()} cores)"
    if world.size > 1 and LAUNCHERS[world.launcher].shares_session and take_own_session():
        chosen["session"] = "its own (Linux divides cores among sessions)"
    if world.device.type == "cpu" and not any(name.startswith("MALLOC_") for name in os.environ) and _keep_memory():
        chosen["freed memory"] = "kept (fewer page faults)"
    return chosen


def share_machine(world: World, machine_ids: Sequence[str]) -> dict[str, str]:
    """Divide a machine's cores among all ranks on it, those in other containers included.

    Args:
        machine_ids: `machine_id()` of every rank.
    """
    cores = os.cpu_count() or 1
    ranks_here = sum(other == machine_id() for other in machine_ids)
    threads = max(1, cores // ranks_here)
    if ranks_here == world.local_size or _user_has_decided(world) or torch.get_num_threads() <= threads:
        return {}
    _take_threads(threads)
    return {"threads": f"{threads} per rank ({ranks_here} ranks in several containers on {cores} cores)"}


@cache
def host_cores() -> int:
    """Return the cores that this host gives the job: those its launcher may use, or fewer under a CPU quota."""
    # The launcher's own affinity mask, because it may have bound each rank to a part of it.
    cores = len(os.sched_getaffinity(0))
    if user_set("SLURM_STEP_ID"):
        # Slurm's daemon, which is srun's parent here, runs on the whole host whatever the job was given.
        with suppress(ValueError):
            cores = max(cores, int(os.environ.get("SLURM_CPUS_ON_NODE", "")))
    else:
        with suppress(OSError):
            cores = max(cores, len(os.sched_getaffinity(os.getppid())))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


@cache
def in_container() -> bool:
    """Return whether Docker or Podman started this process."""
    return any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))


def _threads(world: World) -> int | None:
    """Return PyTorch's threads for this rank; None where the user has decided, or PyTorch decides the same."""
    if world.size == 1 or _user_has_decided(world):
        return None
    # A rank that its launcher has bound to some cores has no use for more threads than these.
    return max(1, min(host_cores() // world.local_size, len(os.sched_getaffinity(0))))


def _take_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    _TAKEN.add(threads)


def _user_has_decided(world: World) -> bool:
    """Return whether the user has chosen PyTorch's threads, by OMP_NUM_THREADS or by `torch.set_num_threads`."""
    by_launcher = LAUNCHERS[world.launcher].limits_threads and os.environ.get("OMP_NUM_THREADS") == "1"
    if user_set("OMP_NUM_THREADS") and not by_launcher:
        return True
    # PyTorch does not tell who has set the number; any but these is nobody's default. Under MPI it is a rank's share.
    cores = {len(os.sched_getaffinity(0)), _physical_cores(), os.cpu_count() or 1, psutil.cpu_count(logical=False) or 1}
    shares = {max(1, count // world.local_size) for count in cores}
    return torch.get_num_threads() not in _TAKEN | ({1} if by_launcher else cores | shares)


def _physical_cores() -> int:
    """Return the cores that this process may use, each of which may be several logical ones."""
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        with suppress(OSError):
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
    return len(siblings) or 1


def _keep_memory() -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES))

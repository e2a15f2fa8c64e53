"""What makes this host fast, decided in one place from what the host is, never over what the user set.

Horovod as it comes loses to DistributedDataParallel on small models. Why, and what is done about each:

* Horovod looks at its queue once per HOROVOD_CYCLE_TIME, by default every millisecond. That sleep is nearly
  the whole cost of a small all-reduce. With patches/0011 a rank that has nothing to exchange sleeps until it has,
  so that a short cycle costs something only while an exchange is on its way (or where there are process sets).
* Open MPI spins while it waits. Every rank has Horovod's thread beside the one that computes; where there are
  more threads than cores, the spinning takes the core from whoever is waited for.
* For large messages Open MPI halves and doubles, and each pair of ranks sends both ways over one connection, which
  its TCP does not do at full speed. A ring uses each connection one way (trainer/open_mpi_rules.conf).
* PyTorch takes every core for every rank, and the ranks of one host push each other off them.
* glibc gives large blocks back to the kernel when they are freed, until it has learnt better, and steps get
  their activations as fresh, zeroed pages again. It is told from the start.
* Every gradient is negotiated by itself; as one group they are negotiated once.
* Gradients are copied together into messages of up to 128 MB, which are sent when the copying is done. Between ranks
  of one host a further message costs less than the copy, so that a large gradient is better sent from where it is.

The figures behind the choices are in docs/performance.md.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import nn

from trainer.config import set_default, user_set
from trainer.world import World

# One group up to here: what is won by overlapping the exchange with the backward pass is then less than
# what each further negotiation costs.
ONE_GROUP_BYTES = 4 * 1024 * 1024
CYCLE_TIME_MS = "0.01"
RING_CHUNK_BYTES = 256 * 1024
"""What a rank passes on in a ring at least: a ring has more messages than other ways, and smaller ones."""
_RULES = Path(__file__).with_name("open_mpi_rules.conf")

# From glibc's malloc.h. 32 MiB is the largest threshold that it takes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_BYTES = 32 * 1024 * 1024
_TRIM_THRESHOLD_BYTES = 1024 * 1024 * 1024


def tune_horovod(world: World) -> dict[str, str]:
    """Sets what Horovod and Open MPI read when they start; returns what it set, and why."""
    chosen = tune_mpi(world)
    # Horovod's own tuning would keep its hands off a value that is set.
    if world.size == 1 or user_set("HOROVOD_AUTOTUNE"):
        return chosen
    if set_default("HOROVOD_CYCLE_TIME", CYCLE_TIME_MS):
        chosen["cycle time"] = f"{CYCLE_TIME_MS} ms (small all-reduces wait for it)"
    in_memory = world.device.type == "cpu" and world.size == world.local_size
    if in_memory and not _is_gloo() and set_default("HOROVOD_FUSION_THRESHOLD", str(ONE_GROUP_BYTES)):
        chosen["fusion"] = f"up to {ONE_GROUP_BYTES / 2**20:.0f} MB (ranks share memory, where copying is what costs)"
    return chosen


def tune_mpi(world: World) -> dict[str, str]:
    """Sets what Open MPI reads when it starts, and what helps every strategy; returns what it set, and why."""
    chosen = tune_host(world)
    _find_open_mpi()
    if world.launcher == "srun":
        # Slurm's PMIx asks for munge first, which the wheel of Open MPI has not; it says so at length.
        set_default("PMIX_MCA_psec", "native")
    cores = host_cores()
    # Whether the other hosts are containers on this very machine is only known once MPI runs, which is too late. To
    # yield in vain costs a system call; to spin in vain, as measured on two containers with 2 cores, a third.
    ranks = world.size if in_container() else world.local_size
    if 2 * ranks > cores and set_default("OMPI_MCA_mpi_yield_when_idle", "1"):
        chosen["idle"] = f"yield (2 threads × {ranks} ranks on {cores} cores)"
    if 2 < world.size != world.local_size and not _is_gloo() and _set_rules():
        chosen["MPI's all-reduce"] = f"a ring from {ring_from_bytes(world.size) / 2**20:.0f} MB up"
    if not single_copy_allowed() and set_default("OMPI_MCA_btl_vader_single_copy_mechanism", "none"):
        chosen["single copy"] = "off (this container refuses process_vm_readv)"
    return chosen


def ring_from_bytes(ranks: int) -> int:
    """From which size on open_mpi_rules.conf has so many ranks on several hosts all-reduce in a ring."""
    return RING_CHUNK_BYTES * min(128, max(4, 1 << (ranks - 1).bit_length()))


def _is_gloo() -> bool:
    """Whether `horovodrun --gloo` started this rank, which then has no MPI."""
    return os.environ.get("HOROVOD_CONTROLLER") == "gloo"


def _set_rules() -> bool:
    # Whoever has set either of the two has chosen.
    prefix = "OMPI_MCA_coll_tuned_"
    if user_set(f"{prefix}use_dynamic_rules") or not set_default(f"{prefix}dynamic_rules_filename", str(_RULES)):
        return False
    return set_default(f"{prefix}use_dynamic_rules", "1")


def tune_host(world: World) -> dict[str, str]:
    """What helps every strategy: this rank's share of the cores, and memory that is kept between steps."""
    chosen = {}
    threads = _threads(world)
    if threads is not None:
        torch.set_num_threads(threads)
        chosen["threads"] = f"{threads} per rank ({world.local_size} ranks on {host_cores()} cores)"
    if world.device.type == "cpu" and not any(name.startswith("MALLOC_") for name in os.environ) and _keep_memory():
        chosen["freed memory"] = "kept (fewer page faults)"
    return chosen


def _threads(world: World) -> int | None:
    """PyTorch threads for this rank; None where the user has decided, or where PyTorch decides the same."""
    # torchrun sets one thread per rank when the user did not say anything.
    by_torchrun = world.launcher == "torchrun" and os.environ.get("OMP_NUM_THREADS") == "1"
    if world.size == 1 or (user_set("OMP_NUM_THREADS") and not by_torchrun):
        return None
    # A rank that its launcher bound to some cores has no use for more threads than these.
    return max(1, min(host_cores() // world.local_size, len(os.sched_getaffinity(0))))


@cache
def in_container() -> bool:
    """Whether Docker or Podman started this process."""
    return any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))


@cache
def machine() -> str:
    """What is the same for two hosts exactly where they are containers on one machine: the kernel's boot."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def share_machine(world: World, machines: Sequence[str]) -> dict[str, str]:
    """Shares the cores of a machine among all ranks on it, those of other containers included.

    Args:
        world: this rank's.
        machines: what `machine` is on each rank.
    """
    cores = os.cpu_count() or 1
    ranks_here = sum(one == machine() for one in machines)
    threads = max(1, cores // ranks_here)
    if ranks_here == world.local_size or user_set("OMP_NUM_THREADS") or torch.get_num_threads() <= threads:
        return {}
    torch.set_num_threads(threads)
    return {"threads": f"{threads} per rank ({ranks_here} ranks in several containers on {cores} cores)"}


def _keep_memory() -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES))


def gradient_groups(model: nn.Module, world: World) -> int | None:
    """Into how many groups Horovod shall gather the gradients; None lets it fuse what it finds per cycle."""
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return 1 if size <= ONE_GROUP_BYTES else None


@cache
def host_cores() -> int:
    """Cores that this host gives the job: those its launcher may use, or fewer where a CPU quota says so."""
    # The launcher's own mask, because it may have bound each rank to a part of it.
    cores = len(os.sched_getaffinity(0))
    # Slurm's own daemon, which is srun's parent here, runs on the whole host whatever the job was given.
    if not user_set("SLURM_STEP_ID"):
        with suppress(OSError):
            cores = max(cores, len(os.sched_getaffinity(os.getppid())))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


@cache
def single_copy_allowed() -> bool:
    """Whether the kernel lets Open MPI copy straight from another rank's memory.

    Docker's default seccomp profile refuses it, and Open MPI then prints `Read -1, expected …` for every
    large message. The call is tried on this process itself, which only such a filter forbids.
    """

    class IoVec(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    source, target = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1)
    here = IoVec(ctypes.addressof(target), 1)
    there = IoVec(ctypes.addressof(source), 1)
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is None:
        return False
    return bool(call(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == 1)


def _find_open_mpi() -> None:
    """The PyPI wheel of Open MPI lies where pip put it, not where it was built; its own mpirun says so to ranks."""
    if Path(sys.prefix, "lib", "libmpi.so.40").exists():
        set_default("OPAL_PREFIX", sys.prefix)

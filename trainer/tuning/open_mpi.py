"""Host-specific defaults for Open MPI, which reads them when it is initialized."""

from __future__ import annotations

import ctypes
import os
import shutil
from functools import cache
from pathlib import Path

from trainer.cluster.environment import set_default, user_set
from trainer.cluster.launchers import LAUNCHERS
from trainer.cluster.mpi import locate_open_mpi
from trainer.cluster.world import World
from trainer.tuning.host import host_cores, in_container

RING_CHUNK_BYTES = 256 * 1024
"""The least that a rank passes on in a ring, which sends more and smaller messages than other algorithms."""
_RULES = Path(__file__).with_name("open_mpi_rules.conf")


def tune_open_mpi(world: World) -> dict[str, str]:
    """Set Open MPI's variables for this host; return what was set, and why."""
    chosen: dict[str, str] = {}
    locate_open_mpi()
    if world.size == 1:
        if not (shutil.which("ssh") or shutil.which("rsh")):
            # A process that no launcher has started starts Open MPI's daemon, which ends without ssh or rsh.
            set_default("OMPI_MCA_ess_singleton_isolated", "1")
        return chosen
    by_scheduler = LAUNCHERS[world.launcher].is_scheduler
    if by_scheduler:
        # Slurm's PMIx asks for munge first, which the wheel of Open MPI lacks, and prints a long warning.
        set_default("PMIX_MCA_psec", "native")
    # Whether the other hosts are containers on this very machine is known only once MPI runs, which is too late. To
    # yield in vain costs a system call; to spin in vain costs a third, measured on two containers with 2 cores.
    ranks = world.size if in_container() else world.local_size
    # Slurm may have bound each rank to a core, of many that the job has on this host.
    cores = min(host_cores(), ranks * len(os.sched_getaffinity(0))) if by_scheduler else host_cores()
    if 2 * ranks > cores and set_default("OMPI_MCA_mpi_yield_when_idle", "1"):
        chosen["idle"] = f"yield (2 threads × {ranks} ranks on {cores} cores)"
    if 2 < world.size != world.local_size and _set_rules():
        chosen["MPI's all-reduce"] = f"a ring from {ring_from_bytes(world.size) / 2**20:.0f} MB up"
    if not single_copy_allowed() and set_default("OMPI_MCA_btl_vader_single_copy_mechanism", "none"):
        chosen["single copy"] = "off (this container refuses process_vm_readv)"
    return chosen


def ring_from_bytes(ranks: int) -> int:
    """Return the size from which open_mpi_rules.conf makes so many ranks on several hosts all-reduce in a ring."""
    return RING_CHUNK_BYTES * min(128, max(4, 1 << (ranks - 1).bit_length()))


@cache
def single_copy_allowed() -> bool:
    """Return whether the kernel lets Open MPI copy from another rank's memory.

    Docker's default seccomp profile refuses it, and Open MPI then prints `Read -1, expected …` for every large
    message. The call is tried on this process itself, which only such a filter forbids.
    """
    source, target = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1)
    # A struct iovec is an address and a length.
    here, there = ((ctypes.c_size_t * 2)(ctypes.addressof(buffer), 1) for buffer in (target, source))
    call = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    return call is not None and call(os.getpid(), here, 1, there, 1, 0) == 1


def _set_rules() -> bool:
    # A user who has set either of the two has chosen.
    prefix = "OMPI_MCA_coll_tuned_"
    if user_set(f"{prefix}use_dynamic_rules") or not set_default(f"{prefix}dynamic_rules_filename", str(_RULES)):
        return False
    return set_default(f"{prefix}use_dynamic_rules", "1")

"""Host-specific defaults for Horovod, Open MPI and PyTorch. Values that the user has set are never overridden.

Horovod's own defaults lose to DistributedDataParallel on small models. The causes, and what is set for each:

* Horovod looks at its queue once per HOROVOD_CYCLE_TIME, by default every millisecond. That sleep is nearly
  the whole cost of a small all-reduce. With patch 0011, a rank that has nothing to exchange sleeps until it has,
  so a short cycle costs something only during an exchange (or where there are process sets).
* Open MPI spins while it waits. Every rank has Horovod's thread beside the one that computes; where there are
  more threads than cores, the spinning takes the core from the thread that is waited for. So it yields there. In
  a session of its own (session.py), a rank that yields doesn't lose its turn to other programs.
* For large messages Open MPI halves and doubles, and each pair of ranks sends both ways over one connection, which
  its TCP does not do at full speed. A ring uses each connection one way (open_mpi_rules.conf).
* PyTorch takes every core for every rank, and the ranks of one host push each other off them.
* glibc returns large freed blocks to the kernel at first, so each step faults its activations' pages in again. Higher
  thresholds keep the memory from the first step on.
* Gradients are copied together into messages of up to 128 MB, which are sent when the copying is done. Between ranks
  of one host a further message costs less than the copy, so a large gradient is better sent from where it is.

The measurements behind the choices are in docs/results.md.
"""

from __future__ import annotations

from trainer.cluster.environment import is_gloo_controlled, set_default, user_set
from trainer.cluster.mpi import connects_by_mpi
from trainer.cluster.world import World
from trainer.tuning.host import tune_host
from trainer.tuning.open_mpi import tune_open_mpi

FUSION_BYTES = 4 * 1024 * 1024
"""Largest message between ranks of one host. A larger bucket is sent as several."""
CYCLE_TIME_MS = "0.01"


def tune(world: World, *, horovod: bool = False) -> dict[str, str]:
    """Set what suits this host, for any strategy; return what was set, and why.

    Call it before Horovod or MPI is imported, because both read their settings when they start.

    Args:
        horovod: whether Horovod all-reduces the gradients.
    """
    chosen = tune_host(world)
    if (horovod or connects_by_mpi(world)) and not is_gloo_controlled():
        chosen |= tune_open_mpi(world)
    if horovod:
        chosen |= tune_horovod(world)
    return chosen


def tune_horovod(world: World) -> dict[str, str]:
    """Set Horovod's variables for this host; return what was set, and why."""
    chosen: dict[str, str] = {}
    # Horovod's autotuning leaves a value alone that is set.
    if world.size == 1 or user_set("HOROVOD_AUTOTUNE"):
        return chosen
    # Measured on CPUs only: Horovod's own cycle stays on GPUs.
    if world.device.type == "cpu" and set_default("HOROVOD_CYCLE_TIME", CYCLE_TIME_MS):
        chosen["cycle time"] = f"{CYCLE_TIME_MS} ms (small all-reduces wait for it)"
    in_memory = world.device.type == "cpu" and world.size == world.local_size
    if in_memory and not is_gloo_controlled() and set_default("HOROVOD_FUSION_THRESHOLD", str(FUSION_BYTES)):
        chosen["fusion"] = f"up to {FUSION_BYTES / 2**20:.0f} MB (ranks share memory, where copying is what costs)"
    return chosen

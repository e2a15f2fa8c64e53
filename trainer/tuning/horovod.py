"""Host-specific defaults for Horovod, which reads them when it is initialized."""

from __future__ import annotations

from trainer.cluster.environment import is_gloo_controlled, set_default, user_set
from trainer.cluster.network import choose_nccl_interface
from trainer.cluster.world import World

FUSION_BYTES = 4 * 1024 * 1024
"""Of a message between ranks of one host. A larger bucket is sent as several."""
CYCLE_TIME_MS = "0.01"


def tune_horovod(world: World) -> dict[str, str]:
    """Set Horovod's variables for this host; return what was set, and why."""
    chosen: dict[str, str] = {}
    if world.device.type == "cuda" and world.size > world.local_size:
        choose_nccl_interface()
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

"""Which checks run in which job: every strategy on 2 ranks or more, and every launcher at least once.

The default run has every strategy on 2 ranks, and Horovod on 3 as well. All of the handle's checks run under Horovod;
under DDP and FSDP those of what depends on the strategy. `make test-all` adds jobs with all of the handle's checks for
each strategy, on 2 ranks and on other numbers, and large networks. What differs in the launcher alone is not repeated:
the launchers have tests of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from tests.distributed.harness import Checks, checks_in, run_checks

_HERE = "tests.distributed"
SHARED = (f"{_HERE}.checks_every_strategy", f"{_HERE}.checks_differences")
LOOPS = f"{_HERE}.checks_loops"
HANDLE = (
    *(
        f"{_HERE}.checks_handle{part}"
        for part in ("", "_loaders", "_streams", "_batches", "_edges", "_parts", "_report", "_drift")
    ),
    LOOPS,
    f"{_HERE}.checks_global_losses",
    f"{_HERE}.checks_channels_last",
    f"{_HERE}.checks_checkpoints",
    f"{_HERE}.checks_storage",
)
# Of these, what a strategy does itself. The others stand above it, and one strategy shows them.
HANDLE_OF_EACH = (f"{_HERE}.checks_handle", f"{_HERE}.checks_handle_edges", LOOPS)
# One mechanism above the transport: in the default run under Horovod.
MECHANISMS = (f"{_HERE}.checks_compression", f"{_HERE}.checks_local_training")
POWER_SGD_HOOK = f"{_HERE}.checks_power_sgd_hook"
NETWORKS = f"{_HERE}.checks_networks"
TIMING = f"{_HERE}.checks_timing"
RING = f"{_HERE}.checks_ring"
BROADCAST = f"{_HERE}.checks_broadcast"
FSDP = (f"{_HERE}.checks_fsdp", f"{_HERE}.checks_fsdp_refusals", f"{_HERE}.checks_fsdp_checkpoints")
# Weights in NHWC order are refused, and each forward pass is every rank's.
_NOT_SHARDED = (f"{_HERE}.checks_channels_last", f"{_HERE}.checks_handle_drift")
BIT_FOR_BIT = f"{_HERE}.checks_horovod"
ENDING = f"{_HERE}.checks_ending"
"""Comes last. Each strategy has its own end."""
NO_RING = f"{_HERE}.checks_refusals.check_a_ring_is_refused_without_mpi"
NO_SINGLE = f"{_HERE}.checks_refusals.check_single_is_refused_among_several_ranks"
NO_HOROVOD = f"{_HERE}.checks_refusals.check_horovod_is_refused_under_torchrun"


@dataclass(frozen=True)
class Job:
    """A launcher's command with all checks that run in it."""

    strategy: str
    launcher: str
    ranks: int
    own: tuple[str, ...] = ()
    """Modules of checks, or single checks, that come after those which every strategy shares."""
    slow: bool = False
    handle: tuple[str, ...] | None = None
    """Those of the handle; None for all where there are two ranks, and in slow jobs."""

    @property
    def modules(self) -> tuple[str, ...]:
        if self.handle is not None:
            return (*SHARED, *self.handle, *self.own)
        # More ranks have fewer cores than that in most places, and take the longest.
        is_tried = self.ranks == 2 and self.strategy != "ring"
        if not (self.slow or is_tried):
            return (*SHARED, *self.own)
        if self.strategy == "fsdp":
            return (*SHARED, *(module for module in HANDLE if module not in _NOT_SHARDED), *self.own)
        return (*SHARED, *HANDLE, *MECHANISMS, *self.own)

    @property
    def checks(self) -> Mapping[str, str]:
        return checks_in(self.modules)

    def __str__(self) -> str:
        return f"{self.strategy}-{self.launcher}-{self.ranks}"


@cache
def run(job: Job, device: str = "cpu", timeout_s: float = 240.0, **env: str) -> Checks:
    """Run a job once, however many tests ask for its result."""
    return run_checks(
        job.modules, job.launcher, job.ranks, strategy=job.strategy, device=device, timeout_s=timeout_s, env=env
    )


JOBS = [
    # The sum of three floats depends on its order, so the hand-written loop is equal bit for bit on 2 and 4 ranks only.
    # The check of the timing is written for two ranks.
    Job("horovod", "horovodrun-gloo", 2, (BIT_FOR_BIT, BROADCAST, TIMING, NO_RING, NO_SINGLE)),
    Job("horovod", "horovodrun-mpi", 3, (BROADCAST, ENDING)),
    Job(
        *("ddp", "torchrun", 2, (TIMING, POWER_SGD_HOOK, NO_RING, NO_SINGLE, NO_HOROVOD, ENDING)),
        handle=(*HANDLE_OF_EACH, f"{_HERE}.checks_handle_drift", f"{_HERE}.checks_checkpoints"),
    ),
    Job("fsdp", "torchrun", 2, FSDP, handle=HANDLE_OF_EACH),
    Job("ring", "mpirun", 2, (RING, TIMING, ENDING)),
    Job("parameter_server", "horovodrun-gloo", 2, (ENDING,), handle=(f"{_HERE}.checks_handle",)),
    Job("horovod", "mpirun", 3, (NETWORKS,), slow=True),
    Job("horovod", "mpirun", 4, (BIT_FOR_BIT,), slow=True, handle=()),
    Job("ddp", "mpirun", 2, slow=True),
    Job("fsdp", "mpirun", 2, slow=True),
    Job("parameter_server", "horovodrun-gloo", 4, (ENDING,), slow=True, handle=(f"{_HERE}.checks_handle", LOOPS)),
    Job("ddp", "horovodrun-gloo", 4, (NETWORKS,), slow=True),
    Job("fsdp", "horovodrun-gloo", 4, (f"{_HERE}.checks_fsdp_checkpoints",), slow=True),
    Job("fsdp", "horovodrun-mpi", 3, (*FSDP, NETWORKS), slow=True),
    Job("ring", "horovodrun-mpi", 3, (RING, NETWORKS), slow=True),
    Job("parameter_server", "torchrun", 2, (NETWORKS, TIMING), slow=True),
]

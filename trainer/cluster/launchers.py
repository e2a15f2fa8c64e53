"""The table of launchers: all that the library knows about each program that starts ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A program that starts ranks."""

    name: str
    variables: tuple[str, ...] = ()
    """Environment variables that it sets for each rank: rank, world size, local rank and local size."""
    programs: tuple[str, ...] = ()
    """Commands that start ranks with it, and modules that `python -m` runs."""
    starts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names by which `trainer run` and `trainer.launch` start it, each with the options that it gets."""
    strategy: str = "horovod"
    """The default strategy of its ranks."""
    rendezvous: Literal["none", "store", "MPI"] = "MPI"
    """What carries the ranks' first messages: torch.distributed's store, or MPI (Horovod under `horovodrun --gloo`)."""
    reaches_hosts: bool = True
    """Whether it starts ranks on other hosts itself; otherwise an agent of it is started on each host."""
    marks_output: bool = True
    """Whether it forwards each line of output with a mark of the rank that has printed it."""
    shares_session: bool = False
    """Whether ranks may be in the launcher's session, among which Linux divides cores."""
    limits_threads: bool = False
    """Whether it sets OMP_NUM_THREADS to 1 where the user has not set it."""
    is_scheduler: bool = False
    """Whether a scheduler starts the ranks: each may see its own GPU and cores alone, and PMIx is the scheduler's."""


_ALL = (
    # In the order in which their variables count: horovodrun and mpirun may run within a step of srun, whose variables
    # are still set there and mean something else.
    Launcher(
        name="torchrun",
        variables=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        programs=("torchrun", "torch.distributed.run", "torch.distributed.launch"),
        starts={"torchrun": ()},
        strategy="ddp",
        rendezvous="store",
        reaches_hosts=False,
        marks_output=False,
        limits_threads=True,
    ),
    Launcher(
        name="horovodrun",
        variables=("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
        programs=("horovodrun",),
        starts={"horovodrun": (), "mpi": ("--mpi",), "gloo": ("--gloo",)},
        shares_session=True,
    ),
    Launcher(
        name="mpirun",
        variables=(
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        programs=("mpirun", "mpiexec", "orterun"),
        shares_session=True,
    ),
    # Numbers on this host are read from what Slurm says about all nodes.
    Launcher(name="srun", variables=("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), programs=("srun",), is_scheduler=True),
    # No launcher: a process by itself.
    Launcher(name="python", strategy="single", rendezvous="none"),
)

LAUNCHERS = {launcher.name: launcher for launcher in _ALL}

STARTS = {start: launcher for launcher in sorted(_ALL, key=lambda row: row.name) for start in launcher.starts}
"""The launchers that `trainer run` and `trainer.launch` can start, by the names under which they do."""

PROGRAMS = {program for launcher in _ALL for program in launcher.programs}
"""Commands and modules that start several processes of a training."""

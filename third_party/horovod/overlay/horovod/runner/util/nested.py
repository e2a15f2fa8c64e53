"""Whether a rank of another launcher has called horovodrun. Each of them would start a job of its own."""

from __future__ import annotations

from collections.abc import Mapping

# What a launcher sets for each of its ranks, their number first. A value may be left over from an outer one
# where only some are set: the script of a batch job has the rank in its allocation, but is no step of srun.
_MPIRUN = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
LAUNCHERS = {
    "horovodrun": ("HOROVOD_SIZE", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "mpirun": _MPIRUN,
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "mpiexec": ("PMI_SIZE", "PMI_RANK"),
    # Last: a library may set these in the ranks of every launcher, for torch.distributed.
    "torchrun": ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
}


def refuse(environ: Mapping[str, str], over_mpi: bool) -> None:
    """Refuse to start a job in one of several processes of another launcher.

    Args:
        environ: the environment of horovodrun.
        over_mpi: whether it is to call mpirun.

    Raises:
        ValueError: it has been called there.
    """
    if over_mpi and environ.get("OMPI_COMM_WORLD_SIZE"):
        raise ValueError(
            "a process of mpirun has called horovodrun, and Open MPI cannot be nested; "
            "start the script with one of the two"
        )
    sizes = {
        launcher: size
        for launcher, (size, *others) in LAUNCHERS.items()
        if environ.get(size, "1") not in ("", "1") and all(environ.get(name) for name in others)
    }
    if sizes:
        launcher, size = next(iter(sizes.items()))
        raise ValueError(
            f"each of the {environ[size]} processes of {launcher} calls horovodrun, and would train a model of its "
            "own; start the script with one of the two. If the models shall train side by side, call it with "
            f"env -u {' -u '.join(sizes.values())}"
        )

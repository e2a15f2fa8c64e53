"""Launch detection: reads rank and world size from the environment variables that each launcher sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.cluster.launchers import LAUNCHERS
from trainer.errors import ConfigError

SECRET = "TRAINER_SECRET"  # noqa: S105 (the name of a variable)
"""Variable with the job's secret, where the supervisor or the user gives the ranks one."""
HANG_TIMEOUT = "TRAINER_HANG_TIMEOUT"
"""Variable with the limit of the watch for hangs, where the supervisor or the user gives rank 0 one."""
FLIGHT_RECORDER = "TRAINER_FLIGHT_RECORDER"
"""Variable that is 0 where PyTorch's flight recorder is not read, and 1 where it is also read over Gloo."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Rank and world size of this process, as its launcher has set them."""

    launcher: str = "python"
    """The program that started this process: python, horovodrun, mpirun, mpiexec, srun or torchrun."""
    rank: int = 0
    """0 to size - 1. Rank 0, the root, writes files, prints, and broadcasts its weights."""
    size: int = 1
    """Processes in all, on all hosts."""
    local_rank: int = 0
    """0 to local_size - 1, counted on this host."""
    local_size: int = 1
    """Processes on this host."""


# Without these, a launcher that calls another launcher says nothing of this process.
_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID", "PMI_SIZE")


def read_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Return the launcher of this process, its rank and the world size. An empty variable counts as unset.

    Plain `python` inside a Slurm allocation is a world of one: only `srun` sets SLURM_PROCID beside the number of
    tasks of the step.

    Raises:
        ConfigError: the process is one of several, and no variable says which; or launchers are nested.
    """
    environ = _non_empty(environ)
    if candidates := _without_copies(launches(environ), environ):
        _refuse_nested(candidates, environ)
        return candidates[0]
    for name in ("WORLD_SIZE", "PMI_SIZE"):
        if environ.get(name, "1") != "1":
            raise ConfigError(
                f"{name} is {environ[name]}, but nothing that horovodrun, mpirun (Open MPI), srun or "
                "torchrun would set says which of these processes this is; start with one of them"
            )
    return Launch()


def launches(environ: Mapping[str, str] = os.environ) -> list[Launch]:
    """Return what each launcher says of this process. The first of them counts; more than one may be a mistake.

    Raises:
        ConfigError: a variable of theirs holds no number.
    """
    environ = _non_empty(environ)
    candidates = []
    for launcher, row in LAUNCHERS.items():
        if row.variables and all(name in environ for name in row.variables):
            rank, size, *local = (_number(environ, name) for name in row.variables)
            local_rank, local_size = local or _local_of_srun(environ)
            by_horovodrun = launcher == "mpirun" and environ.get("HOROVOD_LAUNCHER") == "horovodrun"
            name = "horovodrun" if by_horovodrun else launcher
            candidates.append(Launch(launcher=name, rank=rank, size=size, local_rank=local_rank, local_size=local_size))
    if candidates and candidates[-1].launcher != "srun" and "PMI_RANK" in environ and "PMI_SIZE" in environ:
        rank, size = (_number(environ, name) for name in ("PMI_RANK", "PMI_SIZE"))
        candidates.append(Launch(launcher="mpiexec", rank=rank, size=size))
    return candidates


def _without_copies(candidates: list[Launch], environ: Mapping[str, str]) -> list[Launch]:
    """Leave torchrun out where a script, an image or `trainer.init` has set its variables beside another launcher's.

    torchrun itself also sets TORCHELASTIC_RUN_ID, and whoever starts ranks by hand MASTER_ADDR.
    """
    first, *others = candidates or [Launch()]
    # Of another mpiexec than Open MPI's only the variables are known: its ranks find one another by torchrun's.
    if not others or others[0].launcher not in LAUNCHERS:
        return candidates
    if first.launcher != "torchrun" or "TORCHELASTIC_RUN_ID" in environ:
        return candidates
    is_copy = any((other.rank, other.size) == (first.rank, first.size) for other in others)
    return others if is_copy or "MASTER_ADDR" not in environ else candidates


def _non_empty(environ: Mapping[str, str]) -> Mapping[str, str]:
    return {name: value for name, value in environ.items() if value}


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isdecimal():
        raise ConfigError(f"{name} is {environ[name]!r}; a number is valid, which the launcher sets for each rank")
    return int(environ[name])


def _refuse_nested(candidates: list[Launch], environ: Mapping[str, str]) -> None:
    """Refuse a launcher that several ranks of an outer launcher have called, each for a training of its own.

    The outer launcher may be the usual way to start on every node: torchrun is called once on each node, and mpirun has
    srun start its daemons. Our horovodrun refuses it earlier (`nested.py` in third_party/horovod/overlay).

    Raises:
        ConfigError: names both launchers.
    """
    inner, *others = candidates
    for outer in others:
        if outer.size < 2 or _is_meant(outer, inner, environ):
            continue
        raise ConfigError(
            f"{inner.launcher} with {inner.size} and {outer.launcher} with {outer.size} processes are nested, so that "
            "several models may train side by side; start the script with one of the two (torchrun on several nodes "
            "takes --nnodes, --node-rank, --master-addr and --master-port). If they shall train side by side, call the "
            f"script with env -u {' -u '.join(name for name in _SIZES if name in environ)}"
        )


def _is_meant(outer: Launch, inner: Launch, environ: Mapping[str, str]) -> bool:
    """Return whether the outer launcher only starts what the inner one needs on every node, or says the same."""
    if inner.launcher == "torchrun":
        # Of the nodes that have to wait for each other, one may be left after a failure.
        return environ.get("GROUP_WORLD_SIZE") != "1" or environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if outer.launcher == "srun" and (inner.launcher == "mpirun" or "HOROVOD_LAUNCHER" in environ):
        # A rank on mpirun's own node has the environment that mpirun was called in, others that of a daemon there.
        daemon, mpirun = (environ.get(f"OMPI_MCA_orte_{name}_uri") for name in ("local_daemon", "hnp"))
        return mpirun is None or daemon != mpirun
    return (inner.rank, inner.size) == (outer.rank, outer.size)


def _local_of_srun(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the local rank and the local size of a task of srun."""
    # SLURM_STEP_TASKS_PER_NODE reads like "2(x3),1": two tasks on each of three nodes, one on a fourth.
    per_node: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        tasks, _, repeat = part.rstrip(")").partition("(x")
        per_node += [int(tasks)] * int(repeat or 1)
    node = _number({"SLURM_NODEID": "0", **environ}, "SLURM_NODEID")
    local_rank = _number({"SLURM_LOCALID": "0", **environ}, "SLURM_LOCALID")
    return local_rank, per_node[node] if node < len(per_node) else 1


def is_gloo_controlled() -> bool:
    """Return whether `horovodrun --gloo` started this rank, which then has no MPI."""
    return os.environ.get("HOROVOD_CONTROLLER") == "gloo"


def user_set(name: str) -> bool:
    """Return whether the user, or the launcher, has set an environment variable to a non-empty value."""
    return os.environ.get(name, "") != ""


def set_default(name: str, value: str) -> bool:
    """Set an environment variable unless it has a value; return whether it was set here."""
    if user_set(name):
        return False
    os.environ[name] = value
    return True

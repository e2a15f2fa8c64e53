"""All settings, as frozen dataclasses, and the one place that reads the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from trainer.errors import ConfigError

PRECISIONS = ("fp32", "bf16", "fp16")
COMPRESSIONS = ("none", "fp16")
REDUCTIONS = ("average", "adasum")
DECAYS = ("none", "cosine")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How to train. Every field is checked when it is built.

    Raises:
        ConfigError: one or more values are not valid; the text names all of them.
    """

    batch_size: int = 100
    """Samples per rank and step. The global batch is this times the world size times `accumulate`."""
    eval_batch_size: int | None = None
    """Samples per rank and step of an evaluation; None takes `batch_size`."""
    accumulate: int = 1
    """Micro-batches whose gradients are added up locally before one exchange."""
    precision: str = "fp32"
    """One of `PRECISIONS`: bf16 and fp16 run the forward pass under autocast, fp16 with a gradient scaler."""
    compression: str = "none"
    """One of `COMPRESSIONS`: fp16 halves the bytes on the wire and rounds the gradients."""
    reduction: str = "average"
    """One of `REDUCTIONS`: how gradients are combined. Adasum (Maleki et al. 2020) needs Horovod over MPI."""
    clip_norm: float | None = None
    """Largest 2-norm of the exchanged gradient over all parameters; None leaves it alone."""
    scale_lr: bool = True
    """Multiply the learning rate by world size × accumulate (Goyal et al. 2017). Never done for Adasum."""
    warmup_epochs: float = 1.0
    """Epochs over which the learning rate climbs from its single-rank value to the scaled one."""
    decay: str = "cosine"
    """One of `DECAYS`: what the learning rate does after the warm-up."""
    seed: int = 0
    """Decides on the order of the samples and, with the rank, on the random numbers that `Trainer.fit` draws."""
    sync_batch_norm: bool = False
    """Turn every BatchNorm into one that normalises over the global batch."""
    channels_last: bool = False
    """Hand 4-D inputs to the model in NHWC order, which convolutions on GPUs and on CPUs under bf16 prefer.

    The weights keep their order: Horovod exchanges only what lies in one piece.
    """
    compile: bool = False
    """Run the model through `torch.compile`."""
    dynamic_graph: bool = False
    """Ranks may leave different parameters without a gradient in the same step. Costs a little speed."""
    device: str = "auto"
    """One of `DEVICES`: auto takes the GPU with this process's local rank, where there is one."""
    workers: int = 0
    """DataLoader processes per rank, for datasets that are not tensors in memory."""
    log_every_s: float = 10.0
    """Seconds between progress lines where there is no terminal."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError("; ".join(problems))

    def _problems(self) -> list[str]:
        problems = []
        for name, valid in (
            ("precision", PRECISIONS),
            ("compression", COMPRESSIONS),
            ("reduction", REDUCTIONS),
            ("decay", DECAYS),
            ("device", DEVICES),
        ):
            if getattr(self, name) not in valid:
                problems.append(f"{name} is {getattr(self, name)!r}; valid are {', '.join(valid)}")
        for name in ("batch_size", "eval_batch_size", "accumulate"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{name} is {value}; it must be at least 1")
        for name in ("warmup_epochs", "workers", "seed", "log_every_s"):
            if not 0 <= getattr(self, name) < math.inf:
                problems.append(f"{name} is {getattr(self, name)}; it must be finite and not negative")
        if self.seed >= 2**63:
            problems.append(f"seed is {self.seed}; it must be below 2^63")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            problems.append(f"clip_norm is {self.clip_norm}; it must be finite and positive, or None for no clipping")
        if self.reduction == "adasum" and (self.clip_norm is not None or self.precision == "fp16"):
            problems.append(
                "reduction is 'adasum', which combines finished steps, not gradients: it goes with "
                "neither clip_norm nor precision fp16"
            )
        return problems

    def as_dict(self) -> dict[str, object]:
        """The settings as plain values, for a file or a comparison between ranks."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Who this process is, as its launcher told it through the environment."""

    launcher: str = "python"
    """python, horovodrun, mpirun, srun or torchrun."""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


# What each launcher sets, in the order in which they are looked for: horovodrun and mpirun may run
# inside an srun allocation, whose variables are then still there, and mean something else.
_LAUNCHERS = (
    ("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    ("horovodrun", ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")),
    (
        "mpirun",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
)


def read_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Finds out which launcher started this process, and as which rank.

    Plain `python` inside a Slurm allocation is a world of one: only `srun` sets SLURM_STEP_ID beside
    the number of tasks of the step.
    """
    for launcher, names in _LAUNCHERS:
        if all(name in environ for name in names):
            rank, size, local_rank, local_size = (int(environ[name]) for name in names)
            return Launch(launcher=launcher, rank=rank, size=size, local_rank=local_rank, local_size=local_size)
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        return _read_srun(environ)
    for name in ("WORLD_SIZE", "PMI_SIZE"):
        if environ.get(name, "1") != "1":
            raise ConfigError(
                f"{name} is {environ[name]}, but nothing that horovodrun, mpirun (Open MPI), srun or "
                "torchrun would set says which of these processes this is; start with one of them"
            )
    return Launch()


def _read_srun(environ: Mapping[str, str]) -> Launch:
    # SLURM_STEP_TASKS_PER_NODE reads like "2(x3),1": two tasks on each of three nodes, one on a fourth.
    per_node: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        tasks, _, repeat = part.rstrip(")").partition("(x")
        per_node += [int(tasks)] * int(repeat or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    return Launch(
        launcher="srun",
        rank=int(environ["SLURM_PROCID"]),
        size=int(environ["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(environ.get("SLURM_LOCALID", "0")),
        local_size=per_node[node] if node < len(per_node) else 1,
    )


def user_set(name: str) -> bool:
    """Whether the user (or the launcher) has decided on an environment variable already."""
    return os.environ.get(name, "") != ""


def set_default(name: str, value: str) -> bool:
    """Sets an environment variable unless somebody has; returns whether it did."""
    if user_set(name):
        return False
    os.environ[name] = value
    return True


def parameter_server_settings(ranks: int, environ: Mapping[str, str] = os.environ) -> tuple[int, float]:
    """How many parameter servers a job of so many ranks has, and how many seconds they wait for a rank.

    Raises:
        ConfigError: TRAINER_PARAMETER_SERVERS or TRAINER_PATIENCE_S is not valid.
    """
    servers = environ.get("TRAINER_PARAMETER_SERVERS") or "1"
    patience_s = environ.get("TRAINER_PATIENCE_S") or "600"
    if not servers.isdecimal() or not 1 <= int(servers) <= ranks:
        raise ConfigError(f"TRAINER_PARAMETER_SERVERS is {servers!r}; with {ranks} ranks, valid are 1 to {ranks}")
    try:
        seconds = float(patience_s)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"TRAINER_PATIENCE_S is {patience_s!r}; valid is a positive number of seconds")
    return int(servers), seconds


def timing_settings(environ: Mapping[str, str] = os.environ) -> tuple[Path, int | None] | None:
    """The file that steps are timed for, and after how many of them an epoch ends; None where nobody has asked.

    Raises:
        ConfigError: TRAINER_TIMING_STEPS is not valid.
    """
    file, steps = environ.get("TRAINER_TIMING"), environ.get("TRAINER_TIMING_STEPS")
    if not file:
        return None
    if steps and (not steps.isdecimal() or int(steps) < 1):
        raise ConfigError(f"TRAINER_TIMING_STEPS is {steps!r}; valid is a positive number of steps")
    return Path(file), int(steps) if steps else None


def chosen_strategy(environ: Mapping[str, str] = os.environ) -> str | None:
    """What "auto" stands for in this job, where TRAINER_STRATEGY says so."""
    return environ.get("TRAINER_STRATEGY") or None

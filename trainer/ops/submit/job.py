"""A job that `trainer submit` was asked for, in the same terms for every scheduler, and the options for it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

INDEX = "{index}"
"""Placeholder in the command for the number of a job of an array."""
_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_CLOCK = re.compile(r"(?:(\d{1,3})-)?(\d{1,4}):([0-5]\d):([0-5]\d)")
"""Slurm's own form, days-hours:minutes:seconds. Shorter forms mean minutes to some and hours to others."""
_UNITS_GIB = {"GB": 1, "GiB": 1, "TB": 1024, "TiB": 1024}


def _count(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[1-9]\d{0,5}", text) else None


def _amount(text: str, units: dict[str, int]) -> int | None:
    match = re.fullmatch(r"([1-9]\d{0,5})([A-Za-z]+)", text)
    return int(match[1]) * units[match[2]] if match and match[2] in units else None


def _seconds(text: str) -> int | None:
    match = _CLOCK.fullmatch(text)
    if match is None:
        return _amount(text, _UNITS_S)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return (((24 * days + hours) * 60 + minutes) * 60 + seconds) or None


class Number(NamedTuple):
    """How an option's text becomes a number."""

    read: Callable[[str], int | None]
    """Returns None for a text that is not valid."""
    valid: str


_COUNT = Number(_count, "a number of at least 1")
_MEMORY = Number(partial(_amount, units=_UNITS_GIB), f"a number with {', '.join(_UNITS_GIB)}, as in 16GB")
_TIME = Number(_seconds, f"a number with {', '.join(_UNITS_S)}, as in 2h, or H:MM:SS")
_GRACE = _TIME._replace(valid=_TIME.valid.replace("2h", "120s"))


class Option(NamedTuple):
    """How a field of `Job` is given on the command line. If its default is a tuple, the option may be repeated."""

    group: str
    name: str
    metavar: str | None
    help: str
    number: Number | None
    """None for a text."""


def _option(group: str, name: str, metavar: str | None, text: str, default: Any, number: Number | None = None) -> Any:
    return field(default=default, metadata={"option": Option(group, name, metavar, text, number)})


_machines, _kubernetes, _job = (partial(_option, group) for group in ("the machines", "Kubernetes", "the job"))


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training, and the machines that it is to have."""

    command: tuple[str, ...]
    made_by: str
    """The command that writes this job's file."""

    nodes: int = _machines("--nodes", "N", "number of nodes", 1, _COUNT)
    ranks_per_node: int = _machines("--ranks-per-node", "N", "ranks on each node, one process each", 1, _COUNT)
    gpus_per_node: int = _machines("--gpus-per-node", "N", "GPUs of each node, one for each rank (none)", 0, _COUNT)
    cpus_per_rank: int | None = _machines(
        "--cpus-per-rank", "N", "cores of each rank (the scheduler's default)", None, _COUNT
    )
    memory_gib: int | None = _machines(
        "--memory", "16GB", "memory of each node (the scheduler's default)", None, _MEMORY
    )
    image: str = _machines("--image", "IMAGE", "the container image in which the ranks run (none)", "")

    claim: str = _kubernetes("--claim", "NAME", "a PersistentVolumeClaim for runs/ (none)", "")
    namespace: str = _kubernetes("--namespace", "NAME", "of the job (that of kubectl)", "")
    node_selector: tuple[str, ...] = _kubernetes(
        "--node-selector", "LABEL=VALUE", "a label that nodes have to have; may be repeated", ()
    )
    tolerations: tuple[str, ...] = _kubernetes(
        "--toleration", "TAINT[=VALUE][:EFFECT]", "a taint that nodes may have; may be repeated", ()
    )
    pull_secrets: tuple[str, ...] = _kubernetes(
        "--pull-secret", "NAME", "a secret with which the image is pulled; may be repeated", ()
    )

    name: str = _job("--name", None, "of the job and its file (the script's)", "")
    launcher: str = _job("--launcher", None, "what starts the ranks (the first that the scheduler has)", "")
    time_s: int | None = _job("--time", "2h", "limit: s, m, h or d, or H:MM:SS (the scheduler's default)", None, _TIME)
    grace_s: int = _job("--grace", "120s", "time before the limit at which the ranks save (120s)", 120, _GRACE)
    array: str = _job("--array", "0-3,7", f"a job for each number, which replaces {INDEX} in the command", "")
    directives: tuple[str, ...] = _job("--directive", "=TEXT", "a further option of the scheduler's own", ())

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes together."""
        return self.nodes * self.ranks_per_node

    @property
    def cpus_per_node(self) -> int | None:
        """Cores of each node; None where the scheduler's default is taken."""
        return None if self.cpus_per_rank is None else self.cpus_per_rank * self.ranks_per_node


OPTIONS: dict[str, Option] = {field.name: field.metadata["option"] for field in fields(Job) if field.metadata}
"""The options, by the field of `Job` that each sets, in the order of the help."""


def shell_command(command: tuple[str, ...], index: str = "") -> str:
    """Return a command as a line of shell.

    Args:
        index: the shell's variable that holds the number of a job of an array, as in "$SLURM_ARRAY_TASK_ID".
    """
    return " ".join(
        f'"{index}"'.join(shlex.quote(part) if part else "" for part in word.split(INDEX))
        if INDEX in word
        else shlex.quote(word)
        for word in command
    )

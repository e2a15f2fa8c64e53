"""A job that `trainer submit` was asked for, in the same terms for every scheduler."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

INDEX = "{index}"
"""Placeholder in the command for the number of a job of an array."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training, and the machines that it is to have."""

    name: str
    command: tuple[str, ...]
    nodes: int
    ranks_per_node: int
    launcher: str
    gpus_per_node: int = 0
    cpus_per_rank: int | None = None
    memory_gib: int | None = None
    """Memory of each node."""
    time_s: int | None = None
    grace_s: int = 120
    """Time before the limit at which the ranks are told to save and end."""
    image: str = ""
    array: str = ""
    """Numbers as in "0-3,7", each of which gets a job; empty for a single job."""
    claim: str = ""
    """Name of a PersistentVolumeClaim for runs/, on Kubernetes."""
    namespace: str = ""
    """The job's namespace on Kubernetes; the next three fields are for Kubernetes, too."""
    node_selector: tuple[str, ...] = ()
    """Labels that nodes have to have, as in "gpu=h100"."""
    tolerations: tuple[str, ...] = ()
    """Taints that nodes may have, as in "gpu=h100:NoSchedule"."""
    pull_secrets: tuple[str, ...] = ()
    """Names of secrets with which the image is pulled."""
    made_by: str = ""
    """The command that writes this job's file."""
    directives: tuple[str, ...] = ()
    """Further options of the scheduler, as it spells them."""

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes together."""
        return self.nodes * self.ranks_per_node

    @property
    def cpus_per_node(self) -> int | None:
        """Cores of each node; None where the scheduler's default is taken."""
        return None if self.cpus_per_rank is None else self.cpus_per_rank * self.ranks_per_node


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


def duration(seconds: int) -> str:
    """Return a time as H:MM:SS, which Slurm, Grid Engine and PBS all take."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

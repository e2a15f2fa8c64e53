"""The facts about the hosts and pairs of hosts, from which the checks draw their conclusions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.cluster.nccl_log import describe_transports, read_transports
from trainer.ops.supervise.hosts import Host

_RESULT = '{"bytes": '
"""How the line begins in which an all-reduce tells its result."""


@dataclass(frozen=True, kw_only=True)
class Login:
    """How the start of an agent on a host went."""

    seconds: float = 0.0
    error: str = ""
    """The last lines of ssh; empty where the agent answers."""
    in_small_segments: bool = False
    """Whether it hung until ssh sent and got small packets only."""
    printed: str = ""
    """What the login shell printed before the command ran."""
    user: str = ""
    """Whom ssh logs in as."""
    address: str = ""
    """The name or address that ssh connects to, from -H or its settings."""
    port: str = "22"
    known_hosts: str = ""
    """The file of the host keys that ssh knows."""
    key: str = ""
    """The private key that ssh shows."""


@dataclass(frozen=True, kw_only=True)
class Name:
    """What a name leads to, as one host sees it."""

    addresses: tuple[str, ...] = ()
    error: str = ""
    own: str = ""
    """The looking host's own IPv4 address on the way there."""
    interface: str = ""
    """The interface that has it."""
    in_hosts_file: bool = False
    seconds: float = 0.0

    @property
    def first(self) -> str:
        """Return the first address, or "nothing"."""
        return self.addresses[0] if self.addresses else "nothing"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An exchange of bytes from one host to another."""

    address: str
    """Where the other one listened."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """By port; empty for a port that answered."""
    latency_s: float = 0.0
    large: str = ""
    """The direction in which a large message was lost: "to" or "from" the other host."""
    segment: int = 0
    """The largest TCP segment that got through then, in bytes; 0 for none."""
    bytes_per_s: float | None = None

    @property
    def error(self) -> str:
        """Return the first error of a port."""
        return next((error for error in self.errors.values() if error), "")


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """A small all-reduce over NCCL between two GPUs, of one host or of two."""

    hosts: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    """What the ranks have printed, NCCL's log among it."""
    was_killed: bool = False
    """Whether it had not ended at its limit."""
    limit_s: float = 0.0

    @property
    def lines(self) -> list[str]:
        """Return the lines of all ranks that are not empty."""
        return [line.strip() for output in self.outputs for line in output.splitlines() if line.strip()]

    @property
    def result(self) -> Mapping[str, Any]:
        """Return what rank 0 has measured, as `all_reduce.py` prints it; empty where it did not come so far."""
        return next((json.loads(line) for line in self.lines if line.startswith(_RESULT)), {})

    @property
    def transports(self) -> str:
        """Return how the ranks were connected, in a few words."""
        return describe_transports(read_transports("\n".join(self.outputs)))


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything that was found out. A mapping from a host has an entry for each host that has answered."""

    hosts: tuple[Host, ...]
    here: str
    """This host, by its own name."""
    script: str = ""
    """The training script, whose copies are compared; empty without one."""
    logins: Mapping[str, Login] = field(default_factory=dict)
    names_here: Mapping[str, Name] = field(default_factory=dict)
    """What the hosts' names lead to, as this host sees them."""
    peers: Mapping[str, str] = field(default_factory=dict)
    """By which name other hosts know a host, where that is not the one in -H, as for localhost."""
    own_addresses: frozenset[str] = frozenset()
    """Addresses that names lead to and that are this host's."""
    machines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """machines[host]: what `machine` of agent/machine.py returns there; so for the next three."""
    software: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    interfaces: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    gpus: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    clocks: Mapping[str, float] = field(default_factory=dict)
    """Seconds by which a host's clock is ahead of this one's."""
    names: Mapping[str, Mapping[str, Name]] = field(default_factory=dict)
    """names[observer][host]: what the name of a host leads to on the observer; its own host name stands under ""."""
    owned: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    """owned[host][address]: whether an address that the host's name leads to is the host's own."""
    pairs: Mapping[tuple[str, str], Pair] = field(default_factory=dict)
    all_reduces: tuple[AllReduce, ...] = ()
    """Those that were tried between two GPUs."""
    incomplete: tuple[str, ...] = ()
    """What could not be looked at."""

    @property
    def answering(self) -> tuple[Host, ...]:
        """Return the hosts whose agents answer."""
        return tuple(host for host in self.hosts if host.name in self.machines)

    def way(self, here: str, there: str) -> Name:
        """Return what the name of `there` leads to on `here`; an empty one where that is not known."""
        return self.names.get(here, {}).get(there, Name())

    def versions(self, host: str) -> Mapping[str, str]:
        """Return the versions of packages on a host; empty where it did not tell."""
        versions: Mapping[str, str] = self.software.get(host, {}).get("versions", {})
        return versions

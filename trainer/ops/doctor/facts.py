"""The facts about the hosts and pairs of hosts, from which the checks draw their conclusions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from trainer.ops.doctor.nccl_log import describe_transports, read_transports

_RESULT = '{"bytes": '
"""How the line begins in which an all-reduce tells its result."""


@dataclass(frozen=True)
class Login:
    """How the login to a host and the start of its agent went."""

    seconds: float = 0.0
    error: str = ""
    """The last lines of ssh; empty where the agent answers."""
    printed: str = ""
    """What the login shell printed before the command ran."""
    in_small_segments: bool = False
    """Whether it hung until ssh sent and got small packets only."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What `ssh -G` prints for the host, as in settings["hostname"]; empty where it does not say."""


@dataclass(frozen=True, kw_only=True)
class Name:
    """What a host's name leads to on a host that resolves it."""

    addresses: Sequence[str] = ()
    error: str = ""
    source: str = ""
    """The IPv4 address from which the host that resolves it would connect there."""
    interface: str = ""
    """The interface that has this address."""
    in_hosts_file: bool = False
    seconds: float = 0.0

    @property
    def first(self) -> str:
        """Return the first address, or "nothing"."""
        return self.addresses[0] if self.addresses else "nothing"

    @property
    def reachable_source(self) -> str:
        """Return the source, to which other hosts can connect; empty where it is a loopback address."""
        return "" if not self.source or ip_address(self.source).is_loopback else self.source


@dataclass(kw_only=True, eq=False)
class HostFacts:
    """What is known of a host. All that its agent has not told is empty."""

    name: str
    """As -H has it."""
    slots: int
    is_here: bool = False
    """Whether it is this host."""
    login: Login = Login()
    peer: str = ""
    """The name by which other hosts know it, which is another one for localhost."""
    seen_here: Name = Name()
    """What its name leads to on this host."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    """What `machine` of agent/host.py returns there; so for the next three."""
    software: Mapping[str, Any] = field(default_factory=dict)
    interfaces: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gpus: Mapping[str, Any] = field(default_factory=dict)
    seconds_ahead: float = 0.0
    """By which its clock is ahead of this host's."""
    names: Mapping[str, Name] = field(default_factory=dict)
    """names[host]: what the name of a host leads to on this one; its own host name stands under ""."""
    owned: Mapping[str, bool] = field(default_factory=dict)
    """owned[address]: whether an address that its name leads to is its own."""

    def __str__(self) -> str:
        return self.name

    def way(self, other: HostFacts) -> Name:
        """Return what the name of another host leads to on this one; an empty one where that is not known."""
        return self.names.get(other.name, Name())

    @property
    def versions(self) -> Mapping[str, str]:
        """Return the versions of packages; empty where it did not tell."""
        versions: Mapping[str, str] = self.software.get("versions", {})
        return versions


@dataclass(kw_only=True)
class Pair:
    """An exchange of bytes from one host to another."""

    address: str
    """Where the other host listened."""
    errors: Mapping[str, str] = field(default_factory=dict)
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
        return next(filter(None, self.errors.values()), "")

    @property
    def is_well(self) -> bool:
        """Return whether all ports answered, and large messages got through."""
        return not (self.error or self.large)


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """A small all-reduce over NCCL between two GPUs, of one host or of two."""

    hosts: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    """What the ranks have printed, NCCL's log among it."""
    was_killed: bool = False
    """Whether it was killed at its limit."""
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


@dataclass(kw_only=True)
class Facts:
    """All that is known of the hosts and of the ways between them."""

    hosts: tuple[HostFacts, ...]
    here: str
    """This host, by its own name."""
    script: str = ""
    """The training script, whose copies are compared; empty without one."""
    own_addresses: frozenset[str] = frozenset()
    """Addresses that names lead to and that are this host's."""
    pairs: Mapping[tuple[str, str], Pair] = field(default_factory=dict)
    """By the names of the host that connects and of the host that listens."""
    all_reduces: tuple[AllReduce, ...] = ()
    """Those that were tried between two GPUs."""
    incomplete: tuple[str, ...] = ()
    """What could not be looked at."""

    @property
    def answering(self) -> tuple[HostFacts, ...]:
        """Return the hosts whose agents answer."""
        return tuple(host for host in self.hosts if host.machine)

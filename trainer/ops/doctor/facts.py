"""The facts about the hosts and pairs of hosts, from which the checks draw their conclusions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any


@dataclass(frozen=True)
class Login:
    """How the login to a host and the start of the first program went."""

    seconds: float = 0.0
    error: str = ""
    """The last lines of ssh; empty where the program has answered."""
    printed: str = ""
    """What the login shell printed before the command ran."""
    hangs_in_key_exchange: bool = False
    """Whether ssh was waiting for the answer to its first large message."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What `ssh -G` prints for a host whose login fails, as in settings["hostname"]; empty where it does not say."""


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
    """What is known of a host. All that its programs have not told is empty."""

    name: str
    """As -H has it."""
    slots: int
    is_here: bool = False
    """Whether it is this host."""
    peer: str = ""
    """The name by which other hosts know it, which is another one for localhost."""
    login: Login = Login()
    seen_here: Name = Name()
    """What its name leads to on this host."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    """What `look` of agent/machine.py returns there; below, what that of agent/software.py does."""
    software: Mapping[str, Any] = field(default_factory=dict)
    gpus: str | None = None
    """A line of nvidia-smi for each; None where they were not looked at."""
    interfaces: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    own: Sequence[str] = ()
    """Its own addresses."""
    names: Mapping[str, Name] = field(default_factory=dict)
    """names[host]: what the name of a host leads to on this one; its own host name stands under ""."""
    seconds_ahead: float = 0.0
    """By which its clock is at least ahead of this host's."""

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
    loses_large: bool = False
    """Whether a large message from the other host did not arrive."""
    bytes_per_s: float | None = None

    @property
    def error(self) -> str:
        """Return the first error of a port."""
        return next(filter(None, self.errors.values()), "")


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """A small all-reduce over NCCL between two GPUs, of one host or of two."""

    hosts: tuple[str, ...]
    result: Mapping[str, Any] = field(default_factory=dict)
    """What rank 0 has measured; empty where it did not come so far."""
    output: str = ""
    """What the ranks have printed otherwise."""
    error: str = ""
    """How the rank that failed first has ended; `NO_ANSWER` after the time limit."""


@dataclass(kw_only=True)
class Facts:
    """All that is known of the hosts and of the ways between them."""

    hosts: tuple[HostFacts, ...]
    here: str
    """This host, by its own name."""
    script: str = ""
    """The training script, whose copies are compared; empty without one."""
    own_addresses: frozenset[str] = frozenset()
    """Those of this host."""
    pairs: dict[tuple[str, str], Pair] = field(default_factory=dict)
    """By the names of the host that connects and of the host that listens."""
    all_reduces: tuple[AllReduce, ...] = ()
    """Those that were tried between two GPUs."""
    incomplete: tuple[str, ...] = ()
    """What could not be looked at."""

    @property
    def answering(self) -> tuple[HostFacts, ...]:
        """Return the hosts that have told about themselves."""
        return tuple(host for host in self.hosts if host.machine)

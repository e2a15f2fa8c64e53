"""Hosts of a job and their slots, as `horovodrun -H a:2,b:2` names them."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # never an option of ssh's


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks it takes."""

    name: str
    slots: int

    @property
    def is_here(self) -> bool:
        """Whether it is this machine, which is reached without ssh."""
        name = socket.gethostname()
        return self.name in ("localhost", "127.0.0.1", name, name.partition(".")[0])

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of "a:2,b:2"; a host without a number has one slot.

    Raises:
        ConfigError: a name or a number is not valid, or a host is named twice.
    """
    hosts: list[Host] = []
    for part in text.split(","):
        name, colon, slots = part.partition(":")
        valid = _NAME.fullmatch(name) and (not colon or (slots.isdecimal() and int(slots) > 0))
        if not valid:
            raise ConfigError(f"-H has {part!r}; valid is HOST:SLOTS, as in a:2,b:2")
        if name in (host.name for host in hosts):
            raise ConfigError(f"-H has {name!r} twice; name each host once, with all its slots")
        hosts.append(Host(name, int(slots or 1)))
    return tuple(hosts)


def slots_of(hosts: Sequence[Host]) -> int:
    """Return how many ranks these hosts take together."""
    return sum(host.slots for host in hosts)


def names(hosts: Sequence[Host]) -> str:
    """Return the hosts as -H takes them."""
    return ",".join(map(str, hosts))

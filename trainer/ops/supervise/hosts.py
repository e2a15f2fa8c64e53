"""Hosts of a job and their slots, as `horovodrun -H a:2,b:2` names them."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # never an option of ssh's
_SLOTS = re.compile(r"0*[1-9][0-9]{0,5}")


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


def parse_hosts(text: str, option: str = "-H") -> tuple[Host, ...]:
    """Return the hosts of "a:2,b:2"; a host without a number has one slot.

    Args:
        text: hosts and slots.
        option: how the caller gives them.

    Raises:
        ConfigError: a name or a number is not valid, or a host is named twice.
    """
    slots_by_name: dict[str, int] = {}
    for part in text.split(","):
        name, colon, slots = part.partition(":")
        if not _NAME.fullmatch(name) or (colon and not _SLOTS.fullmatch(slots)):
            raise ConfigError(f"{option} has {part!r}; valid is HOST:SLOTS, as in a:2,b:2")
        if name in slots_by_name:
            raise ConfigError(f"{option} has {name!r} twice; name each host once, with all its slots")
        slots_by_name[name] = int(slots or 1)
    return tuple(Host(name, slots) for name, slots in slots_by_name.items())


def slots_of(hosts: Sequence[Host]) -> int:
    """Return how many ranks these hosts take together."""
    return sum(host.slots for host in hosts)


def names(hosts: Sequence[Host]) -> str:
    """Return the hosts as -H takes them."""
    return ",".join(map(str, hosts))

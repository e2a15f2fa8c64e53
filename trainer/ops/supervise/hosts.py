"""Hosts of a job and their slots, as `horovodrun -H a:2,b:2` names them."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.errors import ConfigError

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*)(?::0*([1-9][0-9]{0,5}))?")  # the name is never an option of ssh's


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

    def command(self, words: Sequence[str], options: Sequence[str] = ()) -> list[str]:
        """Return the command that runs these words on the host.

        Args:
            options: of ssh.
        """
        return [*words] if self.is_here else [*SSH, *options, self.name, shlex.join(words)]


def parse_hosts(text: str, option: str = "-H") -> tuple[Host, ...]:
    """Return the hosts of "a:2,b:2"; a host without a number has one slot.

    Args:
        text: hosts and slots.
        option: how the caller gives them.

    Raises:
        ConfigError: a name or a number is not valid, or a host is named twice.
    """
    hosts: dict[str, Host] = {}
    for part in text.split(","):
        found = _HOST.fullmatch(part)
        if found is None:
            raise ConfigError(f"{option} has {part!r}; valid is HOST:SLOTS, as in a:2,b:2")
        if found[1] in hosts:
            raise ConfigError(f"{option} has {found[1]!r} twice; name each host once, with all its slots")
        hosts[found[1]] = Host(found[1], int(found[2] or 1))
    return tuple(hosts.values())


def slots_of(hosts: Sequence[Host]) -> int:
    """Return how many ranks these hosts take together."""
    return sum(host.slots for host in hosts)


def names(hosts: Sequence[Host]) -> str:
    """Return the hosts as -H takes them."""
    return ",".join(map(str, hosts))

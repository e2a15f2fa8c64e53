"""What `trainer doctor` says: one finding, one cause, one remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """How bad a finding is."""

    PROBLEM = 0
    """A job will fail."""
    WARNING = 1
    """A job may be slow, or fail in some cases."""


class Cause(IntEnum):
    """Kinds of findings, those that explain others first."""

    SAME_HOST = 0
    NAME = 1
    LOGIN = 2
    AGENT = 3
    INTERFACE = 4
    REACH = 5
    MTU = 6
    VERSION = 7
    HOST = 8
    GPU = 9
    SPEED = 10


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that will go wrong, or may."""

    cause: Cause
    level: Level
    hosts: tuple[str, ...]
    """The host, the two of a pair, or all that it is about."""
    text: str
    """The cause, in one line."""
    remedy: str
    """What to do, with the command where there is one."""

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


def problem(cause: Cause, hosts: tuple[str, ...], text: str, remedy: str) -> Finding:
    """Return a finding that makes a job fail."""
    return Finding(cause=cause, level=Level.PROBLEM, hosts=hosts, text=text, remedy=remedy)


def warning(cause: Cause, hosts: tuple[str, ...], text: str, remedy: str) -> Finding:
    """Return a finding that makes a job slow, or fail in some cases."""
    return Finding(cause=cause, level=Level.WARNING, hosts=hosts, text=text, remedy=remedy)


def in_order(findings: list[Finding]) -> list[Finding]:
    """Return the findings without repetitions: problems first, and the cause of others before them."""
    return sorted(dict.fromkeys(findings), key=lambda one: (one.level, one.cause))

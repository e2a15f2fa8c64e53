"""What `trainer doctor` says: each finding is a cause and a remedy."""

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


@dataclass(frozen=True)
class Finding:
    """What makes a job fail, or may: the cause and the remedy."""

    level: Level
    cause: Cause
    hosts: tuple[str, ...]
    """The hosts that it is about."""
    text: str
    """The cause, in one line."""
    remedy: str
    """What to do, with the command where there is one."""

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


class About:
    """Makes findings with the same kind of cause about the same hosts."""

    def __init__(self, cause: Cause, *hosts: object) -> None:
        self.cause, self.hosts = cause, tuple(map(str, hosts))

    def problem(self, text: str, remedy: str) -> Finding:
        """Return a finding that makes a job fail."""
        return Finding(Level.PROBLEM, self.cause, self.hosts, text, remedy)

    def warning(self, text: str, remedy: str) -> Finding:
        """Return a finding that makes a job slow, or fail in some cases."""
        return Finding(Level.WARNING, self.cause, self.hosts, text, remedy)

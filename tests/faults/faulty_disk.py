"""The faulty disk (`faulty_disk.c`) from Python: compiles it, and tells it what to do."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_SOURCE = Path(__file__).with_name("faulty_disk.c")


class Action(IntEnum):
    """What happens at one call, in the order of the enum in the source."""

    COUNT = 0
    KILL_BEFORE = 1
    KILL_AFTER = 2
    FAIL = 3
    FAIL_FROM = 4
    """This call and all after it fail."""
    SHORT_WRITE = 5
    LOSE_DATA = 6
    """Power is lost before the call: half of what was written and not synced is gone."""
    LOSE_ALL = 7
    """So are names that a folder got and that were not synced."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong, and at which call, counted from 1."""

    action: Action
    at: int = 0
    error: int = 0

    def __str__(self) -> str:
        name = f" {errno.errorcode[self.error]}" if self.error else ""
        return f"{self.action.name}{name} at call {self.at}"


def build(folder: Path) -> Path:
    """Compile the library that is to be preloaded."""
    library = folder / "faulty_disk.so"
    flags = ("-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    subprocess.run([os.environ.get("CC", "cc"), *flags, "-o", library, _SOURCE], check=True)
    return library


class FaultyDisk:
    """The library that was preloaded into this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.faulty_disk_call.restype = ctypes.c_char_p

    def watch(self, folder: Path, fault: Fault) -> None:
        """Count the calls under `folder` from now on, and let the fault happen."""
        self._library.faulty_disk_watch(os.fsencode(folder), fault.action, ctypes.c_long(fault.at), fault.error)

    def calls(self) -> list[str]:
        """Return the kind of each call so far."""
        number = self._library.faulty_disk_calls()
        return [self._library.faulty_disk_call(ctypes.c_long(i + 1)).decode() for i in range(number)]

"""What NCCL's log says of how the ranks are connected, and how a run gets to read it without showing it.

With NCCL_DEBUG=INFO, NCCL names the transport of each connection that it sets up, in lines of the subsystem INIT:

    a:71:95 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
    a:71:95 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_SETTINGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"}
_FILE = "NCCL_DEBUG_FILE"
# A plugin's name may have spaces, as "AWS Libfabric" has. The number in parentheses is a rank that sends for this one.
_NETWORK = re.compile(r" via (?:NET|COLLNET)/([^/]+)/\d+(?:\(\d+\))?(/GDRDMA)?")
_NAMES = {" via P2P/": "P2P", " via SHM": "shared memory", " via direct shared memory": "shared memory"}
_ORDER = ("P2P", "shared memory")


def read_transports(log: str) -> frozenset[str]:
    """Return the transports of a log's connections, as in {"P2P", "NET/IB with GPUDirect RDMA"}."""
    found = set()
    for line in log.splitlines():
        if match := _NETWORK.search(line):
            found.add(_network(*match.groups()))
        else:
            found |= {name for mark, name in _NAMES.items() if mark in line}
    return frozenset(found)


def _network(name: str, direct: str | None) -> str:
    if name == "Socket":
        return "TCP sockets"
    return f"NET/{name} {'with' if direct else 'without'} GPUDirect RDMA"


def describe_transports(transports: Iterable[str]) -> str:
    """Return all ranks' transports in a few words, those within a host first; an empty string without any."""
    found = set(transports)
    inside = [name for name in _ORDER if name in found]
    return ", ".join([*inside, *sorted(found.difference(_ORDER))])


class NcclLog:
    """NCCL's log of this process in a private file, from before the first NCCL call until `close`.

    Nothing is changed where the user, or a file of NCCL's settings, has set one of these variables.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        if _is_set():
            return
        with suppress(OSError):  # without a writable folder for temporary files there is no log
            descriptor, name = tempfile.mkstemp(prefix="trainer-nccl-", suffix=".log")
            os.close(descriptor)
            self._path = Path(name)
            os.environ.update(_SETTINGS)
            os.environ[_FILE] = name

    def read(self) -> str:
        """Return the log so far; empty where there is none."""
        with suppress(OSError):
            return self._path.read_text(errors="replace") if self._path is not None else ""
        return ""

    def close(self) -> None:
        """Delete the file and the variables, so that processes which this one starts do not get them.

        NCCL has read them, and still writes into the file, whose few kilobytes go with this process.
        """
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
            for name in (*_SETTINGS, _FILE):
                os.environ.pop(name, None)


def _is_set() -> bool:
    if any(name in os.environ for name in (*_SETTINGS, _FILE)):
        return True
    places = [
        Path("/etc/nccl.conf"),
        Path(os.environ.get("NCCL_CONF_FILE") or f"{os.environ.get('HOME', '')}/.nccl.conf"),
    ]
    for place in places:
        with suppress(OSError):
            if re.search(r"^\s*NCCL_DEBUG", place.read_text(errors="replace"), re.MULTILINE):
                return True
    return False

"""NCCL's log: which transports connect the ranks, read from a private file so that the log is not shown.

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

from trainer.cluster.network import is_in_nccl_conf

_VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
# A plugin's name may have spaces, as "AWS Libfabric" has. The number in parentheses is a rank that sends for this one.
_NETWORK = re.compile(r" via (?:NET|COLLNET)/([^/\n]+)/\d+(?:\(\d+\))?(/GDRDMA)?")
_INSIDE = {" via P2P/": "P2P", " via SHM": "shared memory", " via direct shared memory": "shared memory"}
"""Transports within a host, by what names them in the log."""


def read_transports(log: str) -> frozenset[str]:
    """Return the transports of a log's connections, as in {"P2P", "NET/IB with GPUDirect RDMA"}."""
    transports = {name for mark, name in _INSIDE.items() if mark in log}
    for name, direct in _NETWORK.findall(log):
        network = f"NET/{name} {'with' if direct else 'without'} GPUDirect RDMA"
        transports.add("TCP sockets" if name == "Socket" else network)
    return frozenset(transports)


def describe_transports(transports: Iterable[str]) -> str:
    """Return all ranks' transports in a few words, those within a host first; an empty string without any."""
    return ", ".join(sorted(set(transports), key=lambda name: (name not in _INSIDE.values(), name)))


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
            os.environ.update(zip(_VARIABLES, ("INFO", "INIT", name), strict=True))

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
            for name in _VARIABLES:
                os.environ.pop(name, None)


def _is_set() -> bool:
    """Return whether the user, or a file of NCCL's settings, says where NCCL's log goes."""
    return any(name in os.environ for name in _VARIABLES) or is_in_nccl_conf("NCCL_DEBUG")

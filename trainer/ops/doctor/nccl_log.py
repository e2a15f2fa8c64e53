"""NCCL's log: which transports connect the ranks of an all-reduce that the doctor tries.

With NCCL_DEBUG=INFO, NCCL names the transport of each connection that it sets up, in lines of the subsystem INIT:

    a:71:95 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
    a:71:95 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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

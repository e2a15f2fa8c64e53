"""The kernel's count of the bytes that this process has sent over TCP; for comm_bench.py."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import closing
from pathlib import Path

# The fields tcpi_bytes_sent and tcpi_bytes_retrans of struct tcp_info (linux/tcp.h), since Linux 4.19.
_COUNTERS = struct.Struct("=200xQQ")


def tcp_bytes_sent() -> int | None:
    """Return the bytes sent over all open connections, retransmissions excluded; None where the kernel is older."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            copy = os.dup(int(entry.name))
        except OSError:  # it was closed in the meantime
            continue
        try:
            connection = socket.socket(fileno=copy)
        except OSError:  # not a socket
            os.close(copy)
            continue
        with closing(connection):
            try:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTERS.size)
            except OSError:  # not a TCP socket
                continue
        if len(info) < _COUNTERS.size:
            return None
        sent, retransmitted = _COUNTERS.unpack(info)
        total += sent - retransmitted
    return total

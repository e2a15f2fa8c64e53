"""How many bytes this process has sent over TCP, as the kernel counts them; for comm_bench.py."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import closing
from pathlib import Path

# In struct tcp_info of linux/tcp.h, since Linux 4.19: tcpi_bytes_sent and tcpi_bytes_retrans.
_COUNTERS = struct.Struct("=200xQQ")


def tcp_bytes_sent() -> int | None:
    """Over all connections that this process has open, without what was sent again; None where the kernel is older."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            copy = os.dup(int(entry.name))
        except OSError:  # closed meanwhile
            continue
        try:
            connection = socket.socket(fileno=copy)
        except OSError:  # no socket
            os.close(copy)
            continue
        with closing(connection):
            try:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTERS.size)
            except OSError:  # a socket, but not TCP's
                continue
        if len(info) < _COUNTERS.size:
            return None
        sent, again = _COUNTERS.unpack(info)
        total += sent - again
    return total

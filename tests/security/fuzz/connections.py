"""A connection without a network: the other side has sent its bytes, and has gone."""

from __future__ import annotations

import io
from typing import Any


class Connection:
    """Looks like a connected socket.

    Args:
        data: what the other side has sent.
        ends: whether it has then closed the connection; else it sends nothing more, and reading would block.
    """

    def __init__(self, data: bytes, *, ends: bool = True) -> None:
        self._data, self._ends = memoryview(data), ends
        self.sent = bytearray()

    def recv(self, size: int, *_: object) -> bytes:
        if not self._data and not self._ends:
            raise BlockingIOError
        part, self._data = self._data[:size], self._data[size:]
        return bytes(part)

    def recv_into(self, buffer: Any, *_: object) -> int:
        part = self.recv(len(memoryview(buffer)))
        memoryview(buffer)[: len(part)] = part
        return len(part)

    def send(self, data: Any, *_: object) -> int:
        self.sent += data
        return len(data)

    def sendall(self, data: Any, *_: object) -> None:
        self.sent += data

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO()

    def setblocking(self, *_: object) -> None:
        """Do nothing; so all below."""

    setsockopt = settimeout = shutdown = setblocking

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

"""The rendezvous of `horovodrun --gloo`, with a value in it, and requests to it."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from horovod.runner.http.http_server import RendezvousServer

HOST = "127.0.0.1"


class Store:
    """A rendezvous with one value in it."""

    def __init__(self, server: RendezvousServer) -> None:
        self.server, self.port = server, server.port
        self.names = server.store.names
        assert self.ask("PUT", "scope/key", b"the value") == (200, b"")

    def serves(self, address: str = HOST) -> bool:
        """Whether the job's own processes find what they have put there, and nothing else."""
        began = time.monotonic()
        answer = self.ask("GET", "scope/key", address=address)
        return answer == (200, b"the value") and time.monotonic() - began < 5

    def ask(self, method: str, place: str, body: bytes = b"", address: str = HOST) -> tuple[int, bytes]:
        """Send a request as a rank would."""
        return self.send(method, f"/{self.server.key}/{place}", body, address)

    def send(self, method: str, path: str, body: bytes = b"", address: str = HOST) -> tuple[int, bytes]:
        """Return status and body of the answer; 0 where the connection ended without one."""
        connection = http.client.HTTPConnection(address, self.port, timeout=15)
        try:
            connection.request(method, path, body or None)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def send_raw(self, data: bytes) -> bytes:
        """Return everything that the server sends until it closes the connection."""
        with socket.create_connection((HOST, self.port), timeout=15) as connection:
            answer = b""
            try:
                connection.sendall(data)
                while part := connection.recv(65536):
                    answer += part
            except ConnectionError:
                pass  # what it has not read, it need not answer
            return answer

    def head(self, method: str, place: str, length: int) -> bytes:
        """The head of a rank's request; its body is to follow."""
        return f"{method} /{self.server.key}/{place} HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode()


@contextmanager
def started(addresses: Sequence[str] = (HOST,), plan: Iterable[Any] = ()) -> Iterator[Store]:
    """Start a rendezvous on these addresses for these ranks."""
    server = RendezvousServer(plan, addresses)
    try:
        yield Store(server)
    finally:
        server.stop()

"""The launcher's two HTTP stores, with a value in each, and requests to them."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from horovod.runner.common.util.secret import make_secret_key
from horovod.runner.http import proof
from horovod.runner.http.http_client import put_data_into_kvstore, read_data_from_kvstore
from horovod.runner.http.http_server import KVStoreServer, RendezvousServer

HOST = "127.0.0.1"
KEY = make_secret_key()
KINDS = ("rendezvous", "function")


class Store:
    """A server of the launcher's with one value in it."""

    def __init__(self, server: RendezvousServer | KVStoreServer, port: int) -> None:
        self.server, self.port = server, port
        put_data_into_kvstore(HOST, port, "scope", "key", "the value", KEY)

    def serves(self) -> bool:
        """Whether the job's own processes find what they have put there, and nothing else."""
        began = time.monotonic()
        found = read_data_from_kvstore(HOST, self.port, "scope", "key", KEY)
        return bool(found == "the value") and time.monotonic() - began < 5

    @property
    def http(self) -> Any:
        return self.server._httpd if isinstance(self.server, RendezvousServer) else self.server.httpd

    def names(self) -> set[str]:
        return {f"{scope}/{key}" for scope, values in self.http.cache.items() for key in values}

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        """Return status and body of the answer; 0 where the connection ended without one."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=15)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body or None, sent)
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

    def proven(self, method: str, path: str, body: bytes = b"") -> str:
        """The header of a request that the server accepts, once."""
        return str(proof.sign(KEY, self.port, method, path, body)[0])

    def head(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The head of a request that the server accepts, once; its body is to follow."""
        proven = f"Horovod-Proof: {self.proven(method, path, body)}\r\nContent-Length: {len(body)}"
        return f"{method} {path} HTTP/1.1\r\n{proven}\r\n\r\n".encode()


@contextmanager
def started(kind: str) -> Iterator[Store]:
    """Start a store: "rendezvous" or "function"."""
    server: RendezvousServer | KVStoreServer
    if kind == "rendezvous":
        server = RendezvousServer(0, KEY)
        port, stop = server.start(addresses=[HOST]), server.stop
        server.init([])
    else:
        server = KVStoreServer(0, KEY)
        port, stop = server.start_server([HOST]), server.shutdown_server
    try:
        yield Store(server, port)
    finally:
        stop()

"""The rendezvous of ranks over Gloo: an HTTP store of their addresses, behind a path that nobody can guess.

Every path is /KEY/SCOPE/NAME, and KEY is 128 random bits that the launcher hands to its ranks with their environment.
Whoever does not know it gets 404, whatever they ask for, and nothing that they send is kept. The values are the
addresses of Gloo's pairs; nobody here reads more into them than bytes.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import io
import logging
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any

KEY_VARIABLE = "HOROVOD_RENDEZVOUS_KEY"
"""Brings the key to the ranks, in hexadecimal digits."""

# What a connection may send, and how long it may take, before it has named the key.
STRANGERS_BYTES = 16384
STRANGERS_SECONDS = 10
# How many such connections there may be at an address. A newer one ends the oldest, so that slow ones keep nobody out.
STRANGERS = 128
# Seconds without a byte after which a rank's connection ends.
RANKS_SECONDS = 60
# How long to wait before accepting again when that has failed, for want of file descriptors, say.
ACCEPT_AGAIN_SECONDS = 0.1
# How often to look for a port that is free on all addresses.
_ATTEMPTS = 50
# How long `stop` may take for each address, and with it the end of every job.
_POLL_S = 0.02


class BoundedReader(io.RawIOBase):
    """Reads from a connection, and raises TimeoutError where it goes beyond its bounds."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = STRANGERS_BYTES
        self._deadline: float | None = time.monotonic() + STRANGERS_SECONDS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        seconds = RANKS_SECONDS if self._deadline is None else self._deadline - time.monotonic()
        if not self._left or seconds <= 0:
            raise TimeoutError("the request is too long, or takes too long")
        self._connection.settimeout(seconds)
        received = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= received
        return received

    def expect(self, size: int) -> None:
        """Let a rank send so many bytes more, in its own time."""
        self._left += size
        self._deadline = None
        self._connection.settimeout(RANKS_SECONDS)


class Store:
    """Values by scope and name. A scope of the job's is emptied when all of its ranks have left it."""

    def __init__(self, plan: Iterable[Any] = ()) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, bytes]] = {}
        self._left: dict[str, set[str]] = {}
        self._sizes: dict[str, int] = {}
        for slot in plan:
            self._sizes["global"] = slot.size
            self._sizes[f"local_{slot.hostname}"] = slot.local_size
            self._sizes[f"cross_{slot.local_rank}"] = slot.cross_size

    def names(self) -> set[str]:
        with self._lock:
            return {f"{scope}/{name}" for scope, values in self._values.items() for name in values}

    def get(self, scope: str, name: str) -> bytes | None:
        with self._lock:
            return self._values.get(scope, {}).get(name)

    def put(self, scope: str, name: str, value: bytes) -> None:
        with self._lock:
            self._values.setdefault(scope, {})[name] = value

    def leave(self, scope: str, name: str) -> None:
        """Note that a rank has left a scope, however often it says so; elsewhere, delete what has this name."""
        with self._lock:
            if scope not in self._sizes:
                self._values.get(scope, {}).pop(name, None)
                return
            left = self._left.setdefault(scope, set())
            left.add(name)
            if len(left) == self._sizes[scope]:
                self._values.pop(scope, None)
                self._left.clear()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def setup(self) -> None:
        super().setup()
        self._reader = BoundedReader(self.connection)
        self.rfile = io.BufferedReader(self._reader)
        self._is_rank = False

    def parse_request(self) -> bool:
        """Let pass what knows the key; called with every request's first line, whatever its method."""
        if not super().parse_request():
            return False
        _, key, *place = [*self.path.split("/"), ""]
        # A rank that dies in the middle of a head must leave no empty value.
        length = self.headers.get("Content-Length", "" if self.command == "PUT" else "0")
        if not hmac.compare_digest(key.encode("latin-1", "replace"), self.server.key.encode()):
            self.send_error(404)
            return False
        if not self.server.admit(self.request):
            return False  # A newer connection has ended this one.
        self._is_rank = True
        if len(place) != 3 or not length.isdecimal():
            self.send_error(404)
            return False
        self._reader.expect(int(length))
        self._body = self.rfile.read(int(length))
        self._scope, self._name = place[:2]
        return len(self._body) == int(length)

    def do_GET(self) -> None:
        value = self.server.store.get(self._scope, self._name)
        self._answer(404, b"") if value is None else self._answer(200, value)

    def do_PUT(self) -> None:
        self.server.store.put(self._scope, self._name, self._body)
        self._answer(200, b"")

    def do_DELETE(self) -> None:
        self.server.store.leave(self._scope, self._name)
        self._answer(200, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, *_: Any) -> None:
        # Malformed, of an unknown method, or without the key: a stranger learns of no difference.
        self.close_connection = True
        self._answer(404, b"")

    def log_message(self, *_: object) -> None:
        pass

    def log_error(self, format: str, *args: object) -> None:
        if self._is_rank:
            logging.error(f"rendezvous: {format}", *args)


class Server(socketserver.ThreadingTCPServer):
    """A thread for every connection to one address, and bounds for those who have not named the key yet."""

    # Strangers who hold connections open must not keep the process from ending.
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, place: tuple[str, int], store: Store, key: str) -> None:
        self.store, self.key = store, key
        self._strangers: dict[socket.socket, None] = {}
        self._ranks: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(place, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_AGAIN_SECONDS)  # The caller tries again at once.
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._strangers[request] = None
            oldest = next(iter(self._strangers)) if len(self._strangers) > STRANGERS else None
            if oldest:
                del self._strangers[oldest]
        if oldest:
            _hang_up(oldest)
        super().process_request(request, client_address)

    def admit(self, request: Any) -> bool:
        """Take a connection for a rank's; return whether a newer one has not ended it before."""
        with self._lock:
            if request not in self._strangers:
                return False
            del self._strangers[request]
            self._ranks.add(request)
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._strangers.pop(request, None)
            self._ranks.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Whoever connects could fill the job's output with tracebacks. That a rank has gone, others say.
        with self._lock:
            is_rank = request in self._ranks
        ours = is_rank and not isinstance(sys.exc_info()[1], ConnectionError)
        logging.log(logging.ERROR if ours else logging.DEBUG, "request of %s failed", client_address, exc_info=True)


class RendezvousServer:
    """The rendezvous of one job, on one port of all its launcher's addresses that ranks connect to.

    Raises:
        OSError: this host has none of these addresses.
    """

    def __init__(self, plan: Iterable[Any], addresses: Sequence[str]) -> None:
        self.key = secrets.token_hex(16)
        self.store = Store(plan)
        self.servers = self._listen(addresses)
        self.port: int = self.servers[0].server_address[1]
        for server in self.servers:
            threading.Thread(target=server.serve_forever, args=(_POLL_S,), daemon=True).start()

    def _listen(self, addresses: Sequence[str]) -> list[Server]:
        for _ in range(_ATTEMPTS):
            servers = [Server((addresses[0], 0), self.store, self.key)]
            try:
                for address in addresses[1:]:
                    servers.append(Server((address, servers[0].server_address[1]), self.store, self.key))
                return servers
            except OSError as error:
                for server in servers:
                    server.server_close()
                if error.errno != errno.EADDRINUSE:
                    raise
        raise OSError(errno.EADDRINUSE, f"no port is free on each of {', '.join(addresses)}")

    def stop(self) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended by itself
        connection.shutdown(socket.SHUT_RDWR)

"""The program of the second call: listens, and exchanges bytes with the same program on other hosts."""

from __future__ import annotations

import hmac
import json
import os
import random
import signal
import socket
import socketserver
import struct
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

LONGEST_S = 120
"""A program whose connection hangs ends by itself after that."""
_PROOF_BYTES = 32
_PROOF_S, _PROVEN_S = 10.0, 10.0
_PINGS = 20
LARGE_BYTES = 256 * 1024
_MOST_BYTES = 4 * 1024 * 1024
_REQUEST = struct.Struct("!QQ")
"""How many bytes the client sends after this, and how many it then gets."""
_PING = 0, 1
_CHUNK = bytes(1024 * 1024)
# As jobs take them: given by the kernel (Gloo, NCCL, Open MPI's daemons), as `trainer run --torchrun` chooses its own,
# and the first free one from 1024 up, as Open MPI's ranks do (btl_tcp_port_min_v4).
_CHOSEN_PORTS, _FIRST_PORTS = range(20000, 32000), range(1024, 1424)


def main() -> None:
    """Listen, print the ports, try the ports of other hosts that are then read, print how that went.

    It goes on listening for the others until its input ends.
    """
    signal.alarm(LONGEST_S)
    request = json.loads(sys.stdin.buffer.readline())
    ports = {address: listen(address, request["token"]) for address in request["addresses"]}
    print(json.dumps({"answer": ports}), flush=True)
    line = sys.stdin.buffer.readline()
    if line:
        print(json.dumps({"answer": try_all(token=request["token"], **json.loads(line))}), flush=True)
        sys.stdin.buffer.read()
    os._exit(0)  # waits for no thread


def listen(address: str, token: str) -> list[int]:
    """Listen on three ports of this address as jobs take them; return the ports.

    Whoever connects gets a random challenge, and has to answer with its HMAC-SHA256 under the token.
    """
    servers = [_bind(address, ports) for ports in ((), random.sample(_CHOSEN_PORTS, 20), _FIRST_PORTS)]
    for server in servers:
        server.token = token.encode()
        threading.Thread(target=server.serve_forever, daemon=True).start()
    return [int(server.server_address[1]) for server in servers]


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        with suppress(OSError):
            _serve(self.request, self.server.token)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 64
    token = b""

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: there was no thread left for somebody, and there may be one for the next."""


def _bind(address: str, ports: Iterable[int]) -> _Server:
    """Listen on the first of these ports that is free, else on one that the kernel gives."""
    for port in ports:
        with suppress(OSError):
            return _Server((address, port), _Handler)
    return _Server((address, 0), _Handler)


def _serve(connection: socket.socket, token: bytes) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    challenge = os.urandom(_PROOF_BYTES)
    connection.sendall(challenge)
    proof = _receive(connection, _PROOF_BYTES, time.monotonic() + _PROOF_S)
    if not hmac.compare_digest(proof, hmac.digest(token, challenge, "sha256")):
        return
    connection.settimeout(_PROVEN_S)
    while True:
        sent, wanted = _REQUEST.unpack(_receive(connection, _REQUEST.size))
        if max(sent, wanted) > _MOST_BYTES:
            return
        _receive(connection, sent)
        _send(connection, wanted)


def _receive(connection: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    """Receive exactly `size` bytes; without a deadline, the connection's timeout holds for each part of them."""
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        count = connection.recv_into(rest)
        if not count:
            raise ConnectionResetError("the connection was closed")
        rest = rest[count:]
    return data


def _send(connection: socket.socket, size: int) -> None:
    while size:  # sendall has one timeout for all of them
        size -= connection.send(_CHUNK[: min(size, len(_CHUNK))])


def _connect(address: str, port: int, token: str, timeout_s: float) -> socket.socket:
    connection = socket.create_connection((address, port), timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = _receive(connection, _PROOF_BYTES)
        connection.sendall(hmac.digest(token.encode(), challenge, "sha256"))
    except OSError:
        connection.close()
        raise
    return connection


def _ask(connection: socket.socket, sent: int, wanted: int) -> None:
    connection.sendall(_REQUEST.pack(sent, wanted))
    _send(connection, sent)
    _receive(connection, wanted)


def try_all(token: str, targets: dict[str, Any], wait_s: float, bandwidth_s: float, all_s: float) -> dict[str, Any]:
    """Exchange bytes with the programs on other hosts, first with all at once, then for the bandwidth one by one.

    Args:
        token: that all of them know.
        targets: address and ports by the host's name. The hosts begin with another one each, so that every host sends
            to one and receives from one at a time.
        wait_s: seconds after which a host does not answer.
        bandwidth_s: for each bandwidth.
        all_s: after which no other bandwidth is measured.

    Returns:
        what `probe` does, by the host's name, with "bytes_per_s" that come from there, None where it was not measured;
        and whether a large message from there does not arrive ("loses_large").
    """
    until = time.monotonic() + all_s
    with ThreadPoolExecutor(max_workers=32) as pool:
        results = pool.map(lambda target: probe(target[0], target[1], token, wait_s), targets.values())
        pairs = dict(zip(targets, results))
    for name, (address, ports) in targets.items():
        pair = pairs[name]
        if not any(pair["errors"].values()) and time.monotonic() < until:
            try:
                pair["bytes_per_s"] = bandwidth(address, ports[0], token, bandwidth_s, wait_s)
            except OSError as error:
                pair["loses_large"] = isinstance(error, socket.timeout)
    return pairs


def probe(address: str, ports: list[int], token: str, wait_s: float) -> dict[str, Any]:
    """Exchange bytes with the program that listens there.

    Returns:
        "errors" by port, empty for a port that answers; "latency_s" of a round trip.
    """
    with ThreadPoolExecutor(max_workers=len(ports)) as pool:
        pings = list(pool.map(lambda port: _ping(address, port, token, wait_s), ports))
    errors = {str(port): error for port, (error, _) in zip(ports, pings)}
    return {"address": address, "errors": errors, "latency_s": pings[0][1]}


def _ping(address: str, port: int, token: str, timeout_s: float) -> tuple[str, float]:
    times = []
    try:
        with _connect(address, port, token, timeout_s) as connection:
            for _ in range(_PINGS):
                started = time.perf_counter()
                _ask(connection, *_PING)
                times.append(time.perf_counter() - started)
    except OSError as error:
        return (error.strerror or str(error)).lower(), 0.0
    return "", sorted(times)[len(times) // 2]


def bandwidth(address: str, port: int, token: str, seconds: float, wait_s: float) -> float:
    """Return how many bytes a second come from the program that listens there, in messages that get larger."""
    received, size = 0, LARGE_BYTES
    with _connect(address, port, token, wait_s) as connection:
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            _ask(connection, 0, size)
            received, size = received + size, min(2 * size, _MOST_BYTES)
        return received / (time.perf_counter() - started)


if __name__ == "__main__":
    main()

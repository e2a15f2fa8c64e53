"""Run by an agent on the network: it listens, and exchanges bytes with the agent of another host."""

from __future__ import annotations

import hmac
import os
import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

TOKEN_BYTES = 32
_CHALLENGE_BYTES = _PROOF_BYTES = 32
# Of connections that have proven nothing yet.
_MOST_UNPROVEN, _UNPROVEN_S = 128, 10.0
_ACCEPT_AGAIN_S = 0.05
LARGE_BYTES = 256 * 1024
_MOST_BYTES = 64 * 1024 * 1024
_HEAD = struct.Struct("!cQ")
_CHUNK = bytes(1024 * 1024)
# As jobs take them: given by the kernel (Gloo, NCCL, Open MPI's daemons), as `trainer run --torchrun` chooses its own,
# and the first free one from 1024 up, as Open MPI's ranks do (btl_tcp_port_min_v4).
_CHOSEN_PORTS, _FIRST_PORTS = range(20000, 32000), range(1024, 1424)
_WAYS = {"to": b"U", "from": b"D"}
_SEGMENT_S = 1.5
_SEGMENTS = (8948, 1448, 1408, 1398, 1368, 1328, 1228, 1148, 988, 524)
_LISTEN_S, _PINGS = 60.0, 20


def listen(address: str, token: str) -> list[int]:
    """Listen on this address for a minute, on three ports as jobs take them; return the ports.

    Whoever connects gets a random challenge, and has to answer with its HMAC-SHA256 under the token.
    """
    choices = [0], random.sample(_CHOSEN_PORTS, 20), [*_FIRST_PORTS, 0]
    servers = [_bind(address, ports) for ports in choices]
    for server in servers:
        server.listen(64)
        threading.Thread(target=_accept, args=(server, token.encode()), daemon=True).start()
    return [int(server.getsockname()[1]) for server in servers]


def _bind(address: str, ports: list[int]) -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    for port in ports[:-1]:
        try:
            server.bind((address, port))
        except OSError:
            continue
        return server
    server.bind((address, ports[-1]))
    return server


def _accept(server: socket.socket, token: bytes) -> None:
    deadline = time.monotonic() + _LISTEN_S
    # Connections that have proven nothing yet. A newer one ends the oldest, so that slow ones keep nobody out.
    unproven: list[socket.socket] = []
    with server:
        while time.monotonic() < deadline:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
                unproven.append(connection)
                for oldest in unproven[: max(0, len(unproven) - _MOST_UNPROVEN)]:
                    with suppress(OSError, ValueError):  # it has ended, or proven itself, in the meantime
                        unproven.remove(oldest)
                        oldest.shutdown(socket.SHUT_RDWR)
                threading.Thread(target=_serve, args=(connection, token, unproven), daemon=True).start()
            except (OSError, RuntimeError):  # there is no file descriptor or thread left, or the time is over
                time.sleep(_ACCEPT_AGAIN_S)


def _serve(connection: socket.socket, token: bytes, unproven: list[socket.socket]) -> None:
    with connection, suppress(OSError):
        try:
            is_proven = _is_proven(connection, token)
        finally:
            with suppress(ValueError):  # it was ended
                unproven.remove(connection)
        if is_proven:
            _answer(connection)


def _is_proven(connection: socket.socket, token: bytes) -> bool:
    deadline = time.monotonic() + _UNPROVEN_S
    connection.settimeout(_UNPROVEN_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    challenge = os.urandom(_CHALLENGE_BYTES)
    connection.sendall(challenge)
    proof = _receive(connection, _PROOF_BYTES, deadline)
    return hmac.compare_digest(proof, hmac.digest(token, challenge, "sha256"))


def _answer(connection: socket.socket) -> None:
    connection.settimeout(10.0)
    while True:
        kind, size = _HEAD.unpack(_receive(connection, _HEAD.size))
        if size > _MOST_BYTES:
            return
        if kind == b"U":
            _discard(connection, size)
        if kind == b"D":
            _send(connection, size)
        else:
            connection.sendall(b"!")


def _receive(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    parts = b""
    while len(parts) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise socket.timeout("timed out")  # noqa: UP041 (Python 3.8)
            connection.settimeout(left)
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionResetError("the connection was closed")
        parts += part
    return parts


def _discard(connection: socket.socket, size: int) -> None:
    while size:
        part = connection.recv(min(size, len(_CHUNK)))
        if not part:
            raise ConnectionResetError("the connection was closed")
        size -= len(part)


def _send(connection: socket.socket, size: int) -> None:
    while size:
        size -= connection.send(_CHUNK[: min(size, len(_CHUNK))])


def _connect(address: str, port: int, token: str, timeout_s: float, segment: int = 0) -> socket.socket:
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        if segment:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.connect((address, port))
        challenge = _receive(connection, _CHALLENGE_BYTES)
        connection.sendall(hmac.digest(token.encode(), challenge, "sha256"))
    except OSError:
        connection.close()
        raise
    return connection


def _ask(connection: socket.socket, kind: bytes, size: int) -> None:
    connection.sendall(_HEAD.pack(kind, size))
    if kind == b"U":
        _send(connection, size)
    if kind == b"D":
        _discard(connection, size)
    else:
        _receive(connection, 1)


def probe(address: str, ports: list[int], token: str, wait_s: float) -> dict[str, Any]:
    """Exchange bytes with the agent that listens there.

    Returns:
        "errors" by port, empty for one that answers; "latency_s" of a round trip; "large" is the direction in which
        a large message does not get through ("to", "from"), and "segment" the largest TCP segment that does.
    """
    with ThreadPoolExecutor(max_workers=len(ports)) as pool:
        pings = list(pool.map(lambda port: _ping(address, port, token, wait_s), ports))
    errors = {str(port): error for port, (error, _) in zip(ports, pings)}
    large, segment = ("", 0) if any(errors.values()) else _try_large(address, ports[0], token, wait_s)
    return {"errors": errors, "latency_s": pings[0][1], "large": large, "segment": segment}


def _try_large(address: str, port: int, token: str, wait_s: float) -> tuple[str, int]:
    def gets_through(kind: bytes, wait_s: float, segment: int = 0) -> bool:
        try:
            with _connect(address, port, token, wait_s, segment) as connection:
                _ask(connection, kind, LARGE_BYTES)
        except OSError:
            return False
        return True

    lost = next((way for way in _WAYS if not gets_through(_WAYS[way], wait_s)), "")
    if not lost:
        return "", 0
    with ThreadPoolExecutor(max_workers=len(_SEGMENTS)) as pool:
        tried = list(pool.map(lambda segment: gets_through(_WAYS[lost], _SEGMENT_S, segment), _SEGMENTS))
    return lost, next((segment for segment, well in zip(_SEGMENTS, tried) if well), 0)


def _ping(address: str, port: int, token: str, timeout_s: float) -> tuple[str, float]:
    times = []
    try:
        with _connect(address, port, token, timeout_s) as connection:
            for _ in range(_PINGS):
                started = time.perf_counter()
                _ask(connection, b"P", 0)
                times.append(time.perf_counter() - started)
    except OSError as error:
        return (error.strerror or str(error)).lower(), 0.0
    return "", sorted(times)[len(times) // 2]


def bandwidth(address: str, port: int, token: str, seconds: float) -> float:
    """Return how many bytes a second come from the agent that listens there."""
    received, size = 0, LARGE_BYTES
    with _connect(address, port, token, 5.0) as connection:
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            _ask(connection, b"D", size)
            received, size = received + size, min(2 * size, 4 * 1024 * 1024)
        return received / (time.perf_counter() - started)


OPERATIONS = {"listen": listen, "probe": probe, "bandwidth": bandwidth}

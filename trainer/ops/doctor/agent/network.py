"""An agent's part in the network: its addresses, what names lead to, and bytes that it exchanges with other agents."""

from __future__ import annotations

import array
import fcntl
import hmac
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from .host import read_number, read_text

_SIOCGIFCONF = 0x8912
_INTERFACE = struct.Struct("16s4x4s16x")
"""The name and the IPv4 address in a struct ifreq."""
TOKEN_BYTES = 32
_CHALLENGE_BYTES = _PROOF_BYTES = 32
# Of connections that have proven nothing yet.
_MOST_UNPROVEN, _UNPROVEN_S = 128, 10.0
_ACCEPT_AGAIN_S = 0.05
_LISTEN_S, _PROVEN_S, _PINGS = 60.0, 10.0, 20
LARGE_BYTES = 256 * 1024
_MOST_BYTES = 4 * 1024 * 1024
_REQUEST = struct.Struct("!QQ")
"""How many bytes the client sends after this, and how many it then gets."""
_PING = 0, 1
_WAYS = {"to": (LARGE_BYTES, 1), "from": (0, LARGE_BYTES)}
_CHUNK = bytes(1024 * 1024)
# As jobs take them: given by the kernel (Gloo, NCCL, Open MPI's daemons), as `trainer run --torchrun` chooses its own,
# and the first free one from 1024 up, as Open MPI's ranks do (btl_tcp_port_min_v4).
_CHOSEN_PORTS, _FIRST_PORTS = range(20000, 32000), range(1024, 1424)
_SEGMENT_S = 1.5
_SEGMENTS = (8948, 1448, 1408, 1398, 1368, 1328, 1228, 1148, 988, 524)


def interfaces() -> dict[str, dict[str, Any]]:
    """Return the IPv4 addresses, MTU and speed (Mbit/s; 0 where unknown) of each interface that is up."""
    by_name: dict[str, dict[str, Any]] = {}
    for name, address in _addresses():
        folder = Path("/sys/class/net", name.partition(":")[0])
        entry = by_name.setdefault(folder.name, {"addresses": [], "mtu": read_number(folder / "mtu") or 0, "speed": 0})
        entry["addresses"].append(address)
        if (folder / "device").exists():  # the speed of a virtual interface is made up
            entry["speed"] = max(0, read_number(folder / "speed") or 0)
    return by_name


def _addresses() -> list[tuple[str, str]]:
    buffer = array.array("B", bytes(4096 * _INTERFACE.size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, request))[0]
    entries = _INTERFACE.iter_unpack(buffer[:used])
    return [(name.split(b"\0")[0].decode(), socket.inet_ntoa(address)) for name, address in entries]


def resolve(names: list[str]) -> dict[str, dict[str, Any]]:
    """Resolve names: the addresses of each, this host's address and interface on the way there, and who says so."""
    by_address = {address: name for name, entry in interfaces().items() for address in entry["addresses"]}
    hosts_file = [line.partition("#")[0].split()[1:] for line in read_text("/etc/hosts").splitlines()]
    with ThreadPoolExecutor(max_workers=16) as pool:
        entries = dict(zip(names, pool.map(_resolve, names)))
    for name, entry in entries.items():
        entry["interface"] = by_address.get(entry["source"], "")
        entry["in_hosts_file"] = any(name in aliases for aliases in hosts_file)
    return entries


def _resolve(name: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"addresses": [], "error": "", "source": ""}
    started = time.monotonic()
    try:
        infos = socket.getaddrinfo(name, 9, type=socket.SOCK_STREAM)
        entry["addresses"] = list(dict.fromkeys(info[4][0] for info in infos))
        for address in [address for address in entry["addresses"] if ":" not in address][:1]:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # sends nothing: the kernel only chooses a route
                entry["source"] = probe.getsockname()[0]
    except OSError as error:
        entry["error"] = error.strerror or str(error)
    entry["seconds"] = time.monotonic() - started
    return entry


def owns(addresses: list[str]) -> dict[str, bool]:
    """Return which addresses are this host's own."""
    return {address: _can_bind(address) for address in addresses}


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def listen(address: str, token: str) -> list[int]:
    """Listen on this address for a minute, on three ports as jobs take them; return the ports.

    Whoever connects gets a random challenge, and has to answer with its HMAC-SHA256 under the token.
    """
    servers = [_bind(address, ports) for ports in ((), random.sample(_CHOSEN_PORTS, 20), _FIRST_PORTS)]
    for server in servers:
        threading.Thread(target=_accept, args=(server, token.encode()), daemon=True).start()
    return [int(server.getsockname()[1]) for server in servers]


def _bind(address: str, ports: Iterable[int]) -> socket.socket:
    """Listen on the first of these ports that is free, else on one that the kernel gives."""
    for port in ports:
        with suppress(OSError):
            return socket.create_server((address, port), backlog=64)
    return socket.create_server((address, 0), backlog=64)


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
        connection.settimeout(_PROVEN_S)
        while is_proven:
            sent, wanted = _REQUEST.unpack(_receive(connection, _REQUEST.size))
            if max(sent, wanted) > _MOST_BYTES:
                return
            _receive(connection, sent)
            _send(connection, wanted)


def _is_proven(connection: socket.socket, token: bytes) -> bool:
    deadline = time.monotonic() + _UNPROVEN_S
    connection.settimeout(_UNPROVEN_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    challenge = os.urandom(_CHALLENGE_BYTES)
    connection.sendall(challenge)
    proof = _receive(connection, _PROOF_BYTES, deadline)
    return hmac.compare_digest(proof, hmac.digest(token, challenge, "sha256"))


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


def _ask(connection: socket.socket, sent: int, wanted: int) -> None:
    connection.sendall(_REQUEST.pack(sent, wanted))
    _send(connection, sent)
    _receive(connection, wanted)


def probe(address: str, ports: list[int], token: str, wait_s: float) -> dict[str, Any]:
    """Exchange bytes with the agent that listens there.

    Returns:
        "errors" by port, empty for a port that answers; "latency_s" of a round trip; "large" is the direction in which
        a large message does not get through ("to", "from"), and "segment" the largest TCP segment that does.
    """
    with ThreadPoolExecutor(max_workers=len(ports)) as pool:
        pings = list(pool.map(lambda port: _ping(address, port, token, wait_s), ports))
    errors = {str(port): error for port, (error, _) in zip(ports, pings)}
    large, segment = ("", 0) if any(errors.values()) else _try_large(address, ports[0], token, wait_s)
    return {"errors": errors, "latency_s": pings[0][1], "large": large, "segment": segment}


def _try_large(address: str, port: int, token: str, wait_s: float) -> tuple[str, int]:
    def gets_through(way: str, wait_s: float, segment: int = 0) -> bool:
        try:
            with _connect(address, port, token, wait_s, segment) as connection:
                _ask(connection, *_WAYS[way])
        except OSError:
            return False
        return True

    lost = next((way for way in _WAYS if not gets_through(way, wait_s)), "")
    if not lost:
        return "", 0
    with ThreadPoolExecutor(max_workers=len(_SEGMENTS)) as pool:
        passes = list(pool.map(lambda segment: gets_through(lost, _SEGMENT_S, segment), _SEGMENTS))
    return lost, next((segment for segment, does in zip(_SEGMENTS, passes) if does), 0)


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


def bandwidth(address: str, port: int, token: str, seconds: float) -> float:
    """Return how many bytes a second come from the agent that listens there."""
    received, size = 0, LARGE_BYTES
    with _connect(address, port, token, 5.0) as connection:
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            _ask(connection, 0, size)
            received, size = received + size, min(2 * size, _MOST_BYTES)
        return received / (time.perf_counter() - started)


OPERATIONS = {
    "interfaces": interfaces,
    "resolve": resolve,
    "owns": owns,
    "listen": listen,
    "probe": probe,
    "bandwidth": bandwidth,
}

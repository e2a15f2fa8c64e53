"""What an agent does on the network: resolves names, listens, and exchanges bytes with the agent of another host."""

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TOKEN_BYTES = 32
_CHALLENGE_BYTES = _PROOF_BYTES = 32
_MOST_CONNECTIONS = 1024
LARGE_BYTES = 256 * 1024
_MOST_BYTES = 64 * 1024 * 1024
_HEAD = struct.Struct("!cQ")
_CHUNK = bytes(1024 * 1024)
# As jobs take them: given by the kernel (Open MPI, Gloo, NCCL), and as `trainer run --torchrun` chooses its own.
_CHOSEN_PORTS = range(20000, 32000)
_WAYS = {"to": b"U", "from": b"D"}
_SEGMENT_S = 1.5
_SEGMENTS = (8948, 1448, 1408, 1398, 1368, 1328, 1228, 1148, 988, 524)
_SIOCGIFCONF, _SIOCGIFADDR = 0x8912, 0x8915
_LISTEN_S, _PINGS = 60.0, 20


def interfaces() -> dict[str, dict[str, Any]]:
    """Return the IPv4 addresses, MTU and speed (Mbit/s; 0 where unknown) of each interface that is up."""
    found: dict[str, dict[str, Any]] = {}
    for name, address in _addresses():
        folder = Path("/sys/class/net", name.partition(":")[0])
        entry = found.setdefault(folder.name, {"addresses": [], "mtu": _number(folder / "mtu"), "speed": 0})
        entry["addresses"].append(address)
        if (folder / "device").exists():  # the speed of a virtual interface is made up
            entry["speed"] = max(0, _number(folder / "speed"))
    return found


def _addresses() -> list[tuple[str, str]]:
    size, entry = 4096 * 40, 40
    buffer = array.array("B", bytes(size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iL", size, buffer.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, request))[0]
    raw = buffer.tobytes()[:used]
    return [
        (raw[at : at + 16].split(b"\0")[0].decode(), socket.inet_ntoa(raw[at + 20 : at + 24]))
        for at in range(0, used, entry)
    ]


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def resolve(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return, for each name, its addresses, this host's own address and interface on the way there, and its source."""
    by_address = {address: name for name, entry in interfaces().items() for address in entry["addresses"]}
    with ThreadPoolExecutor(max_workers=16) as pool:
        found = dict(zip(names, pool.map(_resolve, names)))
    for name, entry in found.items():
        entry["interface"] = by_address.get(entry["own"], "")
        entry["in_hosts_file"] = _in_hosts_file(name)
    return found


def _resolve(name: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"addresses": [], "error": "", "own": ""}
    started = time.monotonic()
    try:
        infos = socket.getaddrinfo(name, 9, type=socket.SOCK_STREAM)
    except OSError as error:
        infos = []
        entry["error"] = error.strerror or str(error)
    entry["seconds"] = time.monotonic() - started
    for info in infos:
        if info[4][0] not in entry["addresses"]:
            entry["addresses"].append(info[4][0])
    first = next((str(one) for one in entry["addresses"] if ":" not in one), None)
    if first is not None:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((first, 9))  # sends nothing: the kernel only chooses a route
                entry["own"] = probe.getsockname()[0]
        except OSError as error:
            entry["error"] = error.strerror or str(error)
    return entry


def _in_hosts_file(name: str) -> bool:
    try:
        lines = Path("/etc/hosts").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(name in line.partition("#")[0].split()[1:] for line in lines)


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
    """Listen on this address for a minute, on a port that the kernel gives and on a chosen one; return both.

    Whoever connects gets a random challenge, and has to answer with its HMAC-SHA256 under the token.
    """
    servers = [_bind(address, [0]), _bind(address, random.sample(_CHOSEN_PORTS, 20))]
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
    free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
    with server:
        while time.monotonic() < deadline:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except OSError:
                return
            if free.acquire(blocking=False):
                threading.Thread(target=_serve, args=(connection, token, free), daemon=True).start()
            else:
                connection.close()


def _serve(connection: socket.socket, token: bytes, free: threading.BoundedSemaphore) -> None:
    with connection:
        connection.settimeout(10.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            challenge = os.urandom(_CHALLENGE_BYTES)
            connection.sendall(challenge)
            if not hmac.compare_digest(_receive(connection, _PROOF_BYTES), hmac.digest(token, challenge, "sha256")):
                return
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
        except OSError:
            return
        finally:
            free.release()


def _receive(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
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
        found = list(pool.map(lambda port: _ping(address, port, token, wait_s), ports))
    result: dict[str, Any] = {
        "errors": {str(port): error for port, (error, _) in zip(ports, found)},
        "latency_s": found[0][1], "large": "", "segment": 0,
    }  # fmt: skip
    if not any(error for error, _ in found):
        result["large"], result["segment"] = _try_large(address, ports[0], token, wait_s)
    return result


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


OPERATIONS = {
    "interfaces": interfaces, "resolve": resolve, "owns": owns, "listen": listen, "probe": probe,
    "bandwidth": bandwidth,
}  # fmt: skip

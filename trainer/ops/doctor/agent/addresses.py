"""Read by an agent: interfaces and addresses of its host, and how it resolves names."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_SIOCGIFCONF, _SIOCGIFADDR = 0x8912, 0x8915


def interfaces() -> dict[str, dict[str, Any]]:
    """Return the IPv4 addresses, MTU and speed (Mbit/s; 0 where unknown) of each interface that is up."""
    by_name: dict[str, dict[str, Any]] = {}
    for name, address in _addresses():
        folder = Path("/sys/class/net", name.partition(":")[0])
        entry = by_name.setdefault(folder.name, {"addresses": [], "mtu": _number(folder / "mtu"), "speed": 0})
        entry["addresses"].append(address)
        if (folder / "device").exists():  # the speed of a virtual interface is made up
            entry["speed"] = max(0, _number(folder / "speed"))
    return by_name


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
        entries = dict(zip(names, pool.map(_resolve, names)))
    for name, entry in entries.items():
        entry["interface"] = by_address.get(entry["own"], "")
        entry["in_hosts_file"] = _in_hosts_file(name)
    return entries


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
    first = next((address for address in entry["addresses"] if ":" not in address), None)
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


OPERATIONS = {"interfaces": interfaces, "resolve": resolve, "owns": owns}

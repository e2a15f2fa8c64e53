"""What an agent reads of the network: interfaces and addresses of its host, and how it resolves names."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .files import read_number, read_text

_SIOCGIFCONF = 0x8912
_INTERFACE = struct.Struct("16s4x4s16x")
"""The name and the IPv4 address in a struct ifreq."""


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


OPERATIONS = {"interfaces": interfaces, "resolve": resolve, "owns": owns}

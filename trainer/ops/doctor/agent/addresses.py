"""A host's own addresses, and what names lead to there."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_SIOCGIFCONF = 0x8912
_INTERFACE = struct.Struct("16s4x4s16x")
"""The name and the IPv4 address in a struct ifreq."""


def look(names: list[str]) -> dict[str, Any]:
    """Return the interfaces, the host's own addresses of both versions, and what names lead to.

    Returns:
        "interfaces" has the IPv4 addresses and the MTU of each that is up. "names" has the addresses of each name, this
        host's address and interface on the way there, and whether /etc/hosts says so; its own host name stands under
        the empty name.
    """
    interfaces: dict[str, dict[str, Any]] = {}
    for name, address in _addresses():
        folder = Path("/sys/class/net", name.partition(":")[0])
        mtu = int(_read(folder / "mtu").strip() or 0)
        interfaces.setdefault(folder.name, {"addresses": [], "mtu": mtu})["addresses"].append(address)
    by_address = {address: name for name, entry in interfaces.items() for address in entry["addresses"]}
    sixth = [bytes.fromhex(line.split()[0]) for line in _read("/proc/net/if_inet6").splitlines()]
    own = [*by_address, *(socket.inet_ntop(socket.AF_INET6, address) for address in sixth)]
    hosts_file = [line.partition("#")[0].split()[1:] for line in _read("/etc/hosts").splitlines()]
    asked = {**{name: name for name in names}, "": socket.gethostname()}
    with ThreadPoolExecutor(max_workers=16) as pool:
        entries = dict(zip(asked, pool.map(_resolve, asked.values())))
    for name, entry in entries.items():
        entry["interface"] = by_address.get(entry["source"], "")
        entry["in_hosts_file"] = any(asked[name] in aliases for aliases in hosts_file)
    return {"interfaces": interfaces, "own": own, "names": entries}


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _addresses() -> list[tuple[str, str]]:
    buffer = array.array("B", bytes(4096 * _INTERFACE.size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, request))[0]
    entries = _INTERFACE.iter_unpack(buffer[:used])
    return [(name.split(b"\0")[0].decode(), socket.inet_ntoa(address)) for name, address in entries]


def _resolve(name: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"addresses": [], "error": "", "source": ""}
    try:
        infos = socket.getaddrinfo(name, 9, type=socket.SOCK_STREAM)
        entry["addresses"] = list(dict.fromkeys(info[4][0] for info in infos))
        for address in [address for address in entry["addresses"] if ":" not in address][:1]:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # sends nothing: the kernel only chooses a route
                entry["source"] = probe.getsockname()[0]
    except OSError as error:
        entry["error"] = error.strerror or str(error)
    return entry

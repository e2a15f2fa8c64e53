"""This host's addresses, and which of them leads to the other hosts. Imports the standard library and psutil only."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from ipaddress import ip_address, ip_network
from pathlib import Path

from trainer.cluster.environment import set_default, user_set
from trainer.errors import ConfigError


@cache
def machine_id() -> str:
    """Return the kernel's boot id, which is the same for two hosts only where they are containers on one machine."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def host_id() -> str:
    """Return host name and machine id, which tell this host from one of the same name elsewhere."""
    return f"{socket.gethostname()} {machine_id()}"


def namespace_id() -> str:
    """Return what tells this host from others, and a container with processes of its own from its host.

    The script of `trainer run` says the same in its own words.
    """
    return f"{socket.gethostname()}-{machine_id()}-{Path('/proc/self/ns/pid').readlink()}"


def address_toward(host_ids: Sequence[str]) -> str:
    """Return this host's address on the network that leads to the other hosts; the loopback address without others.

    TRAINER_NETWORK counts first, then the network that the launcher has chosen for its own traffic, then the kernel's
    route to the other hosts.

    Args:
        host_ids: `host_id()` of every rank, this one's included.

    Raises:
        ConfigError: none of these tells the address, or TRAINER_NETWORK is not a network of this host.
    """
    others = sorted({other.split()[0] for other in host_ids if other != host_id()})
    if not others:
        return "127.0.0.1"
    if address := _address_toward(*others):
        return address
    raise ConfigError(
        f"cannot tell which of this host's addresses leads to {', '.join(others)}; set TRAINER_NETWORK to "
        "the network that they share, as in 10.0.0.0/24"
    )


def route_to(host: str) -> str | None:
    """Return this host's own address on the route to `host`; None without a route, or without such a host."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(host), 9))  # sends nothing: the kernel only chooses a route
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str:
    """Return the name of the interface that has `address`.

    Raises:
        ConfigError: no interface of this host has it.
    """
    for name, other in _addresses():
        if other == address:
            return name
    raise ConfigError(f"no interface of this host has the address {address}")


def choose_nccl_interface(address: str | None = None) -> None:
    """Make NCCL take the interface with this address of this host's, unless it has been told one.

    horovodrun cannot tell it over MPI where the hosts' interfaces have different names. None takes the user's or the
    launcher's network.
    """
    if is_in_nccl_conf("NCCL_SOCKET_IFNAME"):  # which gives way to a variable
        return
    address = address or _of_user() or _of_launcher()
    if address and not ip_address(address).is_loopback:
        set_default("NCCL_SOCKET_IFNAME", f"={interface_of(address)}")  # not also a longer name that begins so


def is_in_nccl_conf(name: str) -> bool:
    """Return whether a file of NCCL's settings has a variable whose name begins so."""
    for place in ("/etc/nccl.conf", os.environ.get("NCCL_CONF_FILE") or f"{os.environ.get('HOME', '')}/.nccl.conf"):
        with suppress(OSError):
            if re.search(rf"^\s*{name}", Path(place).read_text(errors="replace"), re.MULTILINE):
                return True
    return False


def choose_gloo_interface(address: str | None) -> None:
    """Make Gloo in PyTorch listen on the interface with this address of this host's, unless it has been told one.

    Left to itself, as with None, it listens on the address of the host's own name, which others may reach even where
    all ranks are on one host.
    """
    if address:
        set_default("GLOO_SOCKET_IFNAME", interface_of(address))


@contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Make Gloo listen on the loopback interface within this context, unless it has been told another one.

    A process that trains alone may start a job on several hosts afterwards, which inherits its environment.
    """
    is_set_here = not user_set("GLOO_SOCKET_IFNAME")
    choose_gloo_interface("127.0.0.1")
    try:
        yield
    finally:
        if is_set_here:
            del os.environ["GLOO_SOCKET_IFNAME"]


def address_toward_master(*, is_one_host: bool) -> str | None:
    """Return this host's address on the network between the ranks where MASTER_ADDR has been set for them.

    It is chosen as by `address_toward`; None where only the loopback address leads to rank 0, which is on this host.

    Args:
        is_one_host: whether all ranks are on this host.
    """
    return "127.0.0.1" if is_one_host else _address_toward()


def _address_toward(*hosts: str) -> str | None:
    for address in (_of_user(), _of_launcher(), *map(route_to, (os.environ.get("MASTER_ADDR", ""), *hosts))):
        if address and not ip_address(address).is_loopback:
            return address
    return None


def _of_user() -> str | None:
    chosen = os.environ.get("TRAINER_NETWORK")
    if not chosen:
        return None
    try:
        address = _first_address(chosen)
    except ValueError as error:
        raise ConfigError(f"TRAINER_NETWORK is {chosen!r}: {error}; valid is a network, as in 10.0.0.0/24") from None
    if address is None:
        here = ", ".join(map(" ".join, _addresses()))
        raise ConfigError(
            f"TRAINER_NETWORK is {chosen!r}, and {socket.gethostname()} has no address there; it has {here}"
        )
    return address


def _of_launcher() -> str | None:
    for variable in ("OMPI_MCA_btl_tcp_if_include", "HOROVOD_GLOO_IFACE"):
        if address := _first_address(os.environ.get(variable, "")):
            return address
    return None


def _first_address(choice: str) -> str | None:
    """Return this host's first address on one of several networks or interfaces, separated by commas."""
    for part in choice.split(","):
        network = ip_network(part, strict=False) if "/" in part else ()
        for name, address in _addresses():
            if name == part or ip_address(address) in network:
                return address
    return None


def _addresses() -> list[tuple[str, str]]:
    """Return this host's IPv4 addresses, each behind the name of its interface."""
    import psutil

    every = [(name, entry) for name, entries in psutil.net_if_addrs().items() for entry in entries]
    return [(name, entry.address) for name, entry in every if entry.family == socket.AF_INET]

"""Which interfaces of a host lead to the other hosts of a job, by the kernel's own routes.

Every host is asked with `python -m horovod.runner.util.route NAME=ADDRESS ...`. Nothing is sent to the
other hosts, and nothing listens.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import psutil

# A login may print a banner before our line.
MARKER = "HOROVOD_ROUTES "
# The launcher, in its place among the names of the hosts. It is not always one of them.
LAUNCHER = ""


class Interface(NamedTuple):
    """One of a host's own interfaces, by the address that it has in a network."""

    name: str
    address: str
    network: str


Routes = Mapping[str, Mapping[str, Interface | None]]
"""routes[host][other]: the interface of host that leads to other; None if other is host itself."""


def own_interfaces() -> dict[str, Interface]:
    """Return this host's interfaces by their IPv4 addresses."""
    return {
        addr.address: Interface(name, addr.address, _network(addr))
        for name, addrs in psutil.net_if_addrs().items()
        for addr in addrs
        if addr.family == socket.AF_INET
    }


def _network(addr: Any) -> str:
    network = ipaddress.ip_network(f"{addr.address}/{addr.netmask or 32}", strict=False)
    # To Open MPI, every address is in a network of /32: it would take the first interface, lo.
    return str(network.supernet() if network.prefixlen == 32 else network)


def _address(name: str, fallback: str | None) -> str:
    try:
        return socket.gethostbyname(name) if name else fallback or ""
    except OSError:
        if fallback:
            return fallback
        raise


def find_routes(targets: Mapping[str, str | None]) -> dict[str, Interface | str | None]:
    """Return, for each host, the interface that leads there.

    Args:
        targets: host names, each with its address for a host that cannot resolve the name itself.

    Returns:
        For each name the interface; None if it is this host itself; or a string, why there is none.
    """
    ours = own_interfaces()
    routes: dict[str, Interface | str | None] = {}
    for name, fallback in targets.items():
        try:
            address = _address(name, fallback)
            if address in ours or address.startswith("127."):
                routes[name] = None
                continue
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                # Connecting a UDP socket sends nothing, it only makes the kernel choose a route.
                sock.connect((address, 9))
                routes[name] = ours[sock.getsockname()[0]]
        except OSError as error:
            routes[name] = str(error.strerror or error)
        except KeyError as error:
            routes[name] = f"no interface has address {error}"
    return routes


def parse(output: str) -> dict[str, Interface | str | None]:
    """Return what find_routes returned on the host that printed the output.

    Raises:
        StopIteration: nothing of it is there.
    """
    line = next(line for line in output.splitlines() if line.startswith(MARKER))
    routes = json.loads(line[len(MARKER) :])
    return {name: Interface(*route) if isinstance(route, list) else route for name, route in routes.items()}


class RoutedInterfaces(set[str]):
    """The names of the interfaces that lead from host to host, and which of them is whose.

    Args:
        routes: with LAUNCHER both as a host that was asked and as another.
        hosts: names of the job's hosts.
    """

    def __init__(self, routes: Routes, hosts: Sequence[str]) -> None:
        self._routes = routes
        self._by_host: dict[str, list[Interface]] = {}
        for host in hosts:
            to_others = [routes[host].get(other) for other in hosts if other != host]
            leading = to_others if any(to_others) else [routes[host].get(LAUNCHER)]
            # Duplicates go, the order of the hosts stays.
            self._by_host[host] = list(dict.fromkeys(interface for interface in leading if interface))
        super().__init__(interface.name for interfaces in self._by_host.values() for interface in interfaces)

    def names_on(self, host: str) -> list[str]:
        """Return the names of a host's interfaces, the best first."""
        return list(dict.fromkeys(interface.name for interface in self._by_host[host])) or sorted(self)

    def common_names(self) -> list[str]:
        """Return the names of the interfaces to use on every host; none if the hosts' names differ."""
        return sorted(self) if all(set(self.names_on(host)) == self for host in self._by_host) else []

    def launcher_address(self, host: str) -> str:
        """Return the launcher's address on the way to a host; its own host takes that to the first other one."""
        return (self._routes[LAUNCHER].get(host) or self._from_launcher()[0]).address

    def launcher_addresses(self) -> list[str]:
        """Return the launcher's addresses on the ways to all hosts."""
        return sorted({interface.address for interface in self._from_launcher()})

    def _from_launcher(self) -> list[Interface]:
        return [interface for interface in self._routes[LAUNCHER].values() if interface]

    def between_ranks(self) -> str:
        """Return the argument of Open MPI's btl_tcp_if_include: a subnet, or names."""
        subnets = sorted({interface.network for interfaces in self._by_host.values() for interface in interfaces})
        # A name that one host lacks makes Open MPI give up there. Of a subnet it only says that it is not there.
        return ",".join((len(subnets) > 1 and self.common_names()) or subnets)

    def between_daemons(self) -> str:
        """Return the argument of Open MPI's oob_tcp_if_include: a subnet, or names, mpirun's own among them."""
        interfaces = [interface for ways in self._routes.values() for interface in ways.values() if interface]
        subnets = {interface.network for interface in interfaces}
        return subnets.pop() if len(subnets) == 1 else ",".join(sorted({interface.name for interface in interfaces}))


def for_nccl(names: Collection[str]) -> str:
    """Return the value of NCCL_SOCKET_IFNAME that means these interfaces, and not also those with longer names."""
    return "=" + ",".join(names)


def names_on(nics: set[str], host: str) -> list[str]:
    """Return the names of the interfaces to use on a host, of which the first is the best."""
    return nics.names_on(host) if isinstance(nics, RoutedInterfaces) else sorted(nics)


def launcher_address(nics: set[str], host: str) -> str:
    """Return the launcher's address to which the processes of a host connect.

    Raises:
        RuntimeError: the launcher has none of the interfaces that the user has named, or no address on it.
    """
    return nics.launcher_address(host) if isinstance(nics, RoutedInterfaces) else _address_on(nics)


def launcher_addresses(nics: set[str]) -> list[str]:
    """Return all the launcher's addresses to which processes of the job connect.

    Raises:
        RuntimeError: as launcher_address.
    """
    return nics.launcher_addresses() if isinstance(nics, RoutedInterfaces) else [_address_on(nics)]


def _address_on(names: set[str]) -> str:
    # Of the interfaces that the user has named, this host may lack some.
    addresses = {interface.name: address for address, interface in own_interfaces().items() if interface.name in names}
    for name in sorted(addresses):
        return addresses[name]
    raise RuntimeError("Cannot find an IPv4 address of the common interface.")


if __name__ == "__main__":
    asked = dict(target.rsplit("=", 1) for target in sys.argv[1:])
    print("\n" + MARKER + json.dumps(find_routes(asked)), flush=True)

"""What host names lead to, and the network between two hosts: which interfaces, and whether bytes get through."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_address
from itertools import combinations, permutations

from trainer.ops.doctor.facts import Facts, HostFacts, Name, Pair
from trainer.ops.doctor.finding import About, Cause, Finding

_TUNNEL = re.compile(r"tun|tap|wg|ppp|tailscale|zt|ipsec|gre")
SLOW_BYTES_PER_S = 12.5e6
"""100 Mbit/s: the gradients of a model with 25 million parameters take 8 s a step."""
Exchange = tuple[HostFacts, HostFacts, Pair]
"""The host that connects, the host that listens, and how that went."""


def check_names(facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong with the names of the hosts that answer."""
    for host, other in permutations(facts.answering, 2):
        if other.name in host.names:
            yield from _name(host, other)
    for host in facts.answering:
        yield from _own_name(host)


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong between the hosts that answer."""
    yield from _shared_addresses(facts)
    for first, second in combinations(facts.answering, 2):
        yield from _same_name(first, second)
        there, back = facts.pairs.get((first.name, second.name)), facts.pairs.get((second.name, first.name))
        for host, other in ((first, second), (second, first)):
            yield from _tunnel(host, other, About(Cause.INTERFACE, first, second))
        if there is None or back is None:
            continue
        exchanges = (first, second, there), (second, first, back)
        if there.error or back.error:
            yield _unreachable(*exchanges)
        elif there.loses_large or back.loses_large:
            yield _too_large(*(exchanges[0] if there.loses_large else exchanges[1])[:2])
        else:
            yield from _slow(About(Cause.SPEED, first, second), *exchanges)


def _same_name(first: HostFacts, second: HostFacts) -> Iterator[Finding]:
    name = first.machine["host_name"]
    if name == second.machine["host_name"]:
        yield About(Cause.SAME_HOST, first, second).problem(
            f"{first} and {second} both have the host name {name!r}, so launchers count their ranks as of one host",
            f"rename one: `sudo hostnamectl set-hostname {second}` there, or --hostname of its container; if they are "
            "one host, name it once",
        )


def _name(host: HostFacts, other: HostFacts) -> Iterator[Finding]:
    about, here, seen = About(Cause.NAME, host, other), host.name, host.way(other)
    name, right = other.peer, _address(other)
    address = next((address for address in seen.addresses if ":" not in address), "")
    addition = f"add its address to /etc/hosts on {here}{f': `{right} {name}`' if right else ''}"
    if not seen.addresses:
        yield about.problem(f"{here} cannot resolve the name {name} ({seen.error})", addition)
    elif address and ip_address(address).is_loopback:
        text = f"on {here}, {name} leads to {address}, which is {here} itself"
        yield about.problem(text, correction(here, name, seen, right))
    elif address and other.own and address not in other.own:
        whose = ", which is its own" if address in host.own else ""
        whose += f" ({seen.interface})" if is_bridge(seen.interface) else ""
        has = f"{name} has no such address (it has {_all_addresses(other)})"
        text = f"on {here}, {name} leads to {address}{whose}, and {has}"
        yield about.problem(text, correction(here, name, seen, right))
    elif ":" in seen.first and other.own and seen.first not in other.own:
        text = f"on {here}, {name} leads first to the IPv6 address {seen.first}, which {name} does not have"
        yield about.warning(text, correction(here, name, seen, address))


def _own_name(host: HostFacts) -> Iterator[Finding]:
    seen = host.names.get("", Name())
    if seen.addresses and ip_address(seen.first.partition("%")[0]).is_loopback:
        yield About(Cause.NAME, host).warning(
            f"on {host}, its own host name leads to {seen.first}, where no other host reaches what listens by name",
            correction(host.name, host.machine["host_name"], seen, _address(host)),
        )


def correction(here: str, name: str, seen: Name, right: str = "") -> str:
    """Return the remedy for a name that leads to a wrong address."""
    place = f"in /etc/hosts on {here}" if seen.in_hosts_file else f"in the DNS, or in /etc/hosts on {here}"
    return f"correct the line of {name} {place}{f': `{right} {name}`' if right else ''}"


def is_bridge(interface: str) -> bool:
    """Return whether an interface leads to containers or virtual machines on its own host."""
    return re.match(r"docker|br-|veth|virbr|cni|flannel|cali|lxc|lxd|podman|kube", interface) is not None


def into_bridge(here: str, there: str, way: Name) -> tuple[str, str]:
    """Return text and remedy for a way that leads into a bridge."""
    leads = f"({', '.join(way.addresses)}) leads into {way.interface} ({way.source})"
    return (
        f"the way from {here} to {there} {leads}, a bridge to containers on {here}",
        f"`ip route get {way.first}` on {here}; give the bridge another subnet, or correct the address of {there} in "
        f"/etc/hosts on {here}",
    )


def _address(host: HostFacts) -> str:
    """Return the address that a host has on the way to others; empty where it has none but a loopback address."""
    return next(filter(None, (way.reachable_source for way in host.names.values())), "")


def _all_addresses(host: HostFacts) -> str:
    interfaces = {name: entry["addresses"] for name, entry in host.interfaces.items() if name != "lo"}
    return ", ".join(f"{address} on {name}" for name in interfaces for address in interfaces[name]) or "none"


def _tunnel(host: HostFacts, other: HostFacts, about: About) -> Iterator[Finding]:
    way = host.way(other)
    if _TUNNEL.match(way.interface):
        yield about.warning(
            f"the way from {host} to {other} leads through the tunnel {way.interface} ({way.source})",
            f"give {other} its address on the hosts' own network, in /etc/hosts on {host}",
        )


def _shared_addresses(facts: Facts) -> Iterator[Finding]:
    owners: dict[str, dict[str, str]] = {}
    for host in facts.answering:
        for interface, entry in host.interfaces.items():
            for address in entry["addresses"]:
                owners.setdefault(address, {})[host.name] = interface
    for address, interfaces in sorted(owners.items()):
        if len(interfaces) < 2 or address.startswith("127."):
            continue
        hosts = [host for host in facts.answering if host.name in interfaces]
        quantity = "both" if len(hosts) == 2 else "all"
        ways = {host.way(other).interface for host, other in permutations(hosts, 2)}
        network = (ways.pop() if len(ways) == 1 else "") or "NETWORK"
        yield About(Cause.INTERFACE, *interfaces).warning(
            f"{_and(*interfaces)} {quantity} have the address {address} (on {_and(*interfaces.values())}), where plain "
            "mpirun may connect to the wrong host",
            f"`mpirun --mca btl_tcp_if_include {network}`; horovodrun and trainer choose by route",
        )


def _and(*words: str) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _unreachable(forth: Exchange, back: Exchange) -> Finding:
    (host, other, failed), (_, _, opposite) = (forth, back) if forth[2].error else (back, forth)
    about, why = About(Cause.REACH, forth[0], back[0]), _failure(failed)
    remedy = _let_through(other, opposite.address)
    if opposite.error:
        text = f"{host} and {other} cannot connect to each other ({why}, and {_failure(opposite)})"
        remedy += f", and {_let_through(host, failed.address)}"
        return about.problem(f"{text}, though ssh works: a firewall", remedy)
    text = f"{host} cannot connect to {other} ({why}), while {other} connects to {host}"
    return about.problem(f"{text}: a firewall", remedy)


def _failure(pair: Pair) -> str:
    port = next(port for port, error in pair.errors.items() if error)
    answering = next((number for number, error in pair.errors.items() if not error), None)
    answers = f", but port {answering} answers" if answering is not None else ""
    return f"{pair.address} port {port}: {pair.errors[port]}{answers}"


def _let_through(host: HostFacts, source: str) -> str:
    return f"on {host}, let all TCP from {source} through: `sudo iptables -I INPUT -p tcp -s {source} -j ACCEPT`"


def _too_large(end: HostFacts, begin: HostFacts) -> Finding:
    interface = begin.way(end).interface or "INTERFACE"
    mtu = begin.interfaces.get(interface, {}).get("mtu", "unknown")
    return About(Cause.MTU, begin, end).problem(
        f"large packets from {begin} to {end} get lost (the MTU of {interface} is {mtu}, and less gets through)",
        f"`ping -M do -s 1472 {end}` on {begin}, with smaller numbers until it answers; `sudo ip link set dev "
        f"{interface} mtu MTU` on both with 28 more, or let ICMP 'fragmentation needed' through between them",
    )


def _slow(about: About, *exchanges: Exchange) -> Iterator[Finding]:
    for host, other, pair in exchanges:
        if pair.bytes_per_s is not None and pair.bytes_per_s < SLOW_BYTES_PER_S:
            yield about.warning(
                f"from {other} to {host} come {8 * pair.bytes_per_s / 1e6:.0f} Mbit/s",
                f"`ethtool {other.way(host).interface}` on {other}, and `iperf3` between them; with gradients this "
                "slow, see docs/scaling.md",
            )

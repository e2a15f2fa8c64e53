"""Names of hosts, and what they lead to on each host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_address
from itertools import combinations, permutations

from trainer.ops.doctor.facts import Facts, HostFacts, Name
from trainer.ops.doctor.finding import About, Cause, Finding


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong with the names of the hosts that answer."""
    for first, second in combinations(facts.answering, 2):
        yield from _same_host(facts.here, first, second)
    for host, other in permutations(facts.answering, 2):
        if other.name in host.names:
            yield from _peer(host, other)
    for host in facts.answering:
        yield from _itself(host)


def _same_host(here: str, first: HostFacts, second: HostFacts) -> Iterator[Finding]:
    about, mine, theirs = About(Cause.SAME_HOST, first, second), first.machine, second.machine
    if mine["identity"] and mine["identity"] == theirs["identity"]:
        seen = second.seen_here
        text = f"{first} and {second} are one and the same host: {second} leads to {seen.first} on {here}"
        yield about.problem(text, correction(here, second.name, seen))
    elif mine["host_name"] == theirs["host_name"]:
        name = repr(mine["host_name"])
        yield about.problem(
            f"{first} and {second} both have the host name {name}, so launchers count their ranks as of one host",
            f"rename one: `sudo hostnamectl set-hostname {second}` there, or --hostname of its container",
        )


def _peer(host: HostFacts, other: HostFacts) -> Iterator[Finding]:
    about, here, seen = About(Cause.NAME, host, other), host.name, host.way(other)
    name, right = other.peer, _address(other)
    address = next((address for address in seen.addresses if ":" not in address), "")
    addition = f"add its address to /etc/hosts on {here}{f': `{right} {name}`' if right else ''}"
    if not seen.addresses:
        yield about.problem(f"{here} cannot resolve the name {name} ({seen.error})", addition)
    elif not address:
        text = f"on {here}, {name} has IPv6 addresses only ({seen.first}), and launchers take IPv4"
        yield about.problem(text, addition)
    elif ip_address(address).is_loopback:
        text = f"on {here}, {name} leads to {address}, which is {here} itself"
        yield about.problem(text, correction(here, name, seen, right))
    elif other.owned and not other.owned.get(address, True):
        whose = ", which is its own" if host.owned.get(address) else ""
        whose += f" ({seen.interface})" if is_bridge(seen.interface) else ""
        has = f"{name} has no such address (it has {_all_addresses(other)})"
        text = f"on {here}, {name} leads to {address}{whose}, and {has}"
        yield about.problem(text, correction(here, name, seen, right))
    elif ":" in seen.first and not other.owned.get(seen.first, True):
        text = f"on {here}, {name} leads first to the IPv6 address {seen.first}, which {name} does not have"
        yield about.warning(text, correction(here, name, seen, address))


def _itself(host: HostFacts) -> Iterator[Finding]:
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
    addresses = (way.source for way in host.names.values())
    return next((address for address in addresses if address and not ip_address(address).is_loopback), "")


def _all_addresses(host: HostFacts) -> str:
    interfaces = {name: entry["addresses"] for name, entry in host.interfaces.items() if name != "lo"}
    return ", ".join(f"{address} on {name}" for name in interfaces for address in interfaces[name]) or "none"

"""Names of hosts, and what they lead to on each host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_address
from itertools import combinations, permutations

from trainer.ops.doctor.facts import Facts, Name
from trainer.ops.doctor.finding import About, Cause, Finding


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong with the names of the hosts that answer."""
    hosts = [host.name for host in facts.answering]
    for first, second in combinations(hosts, 2):
        yield from _same_host(facts, first, second)
    for here, there in permutations(hosts, 2):
        if seen := facts.names.get(here, {}).get(there):
            yield from _peer(facts, here, there, seen)
    for here in facts.names:
        yield from _itself(facts, here)


def _same_host(facts: Facts, first: str, second: str) -> Iterator[Finding]:
    about = About(Cause.SAME_HOST, first, second)
    mine, theirs = facts.machines[first], facts.machines[second]
    if mine["identity"] and mine["identity"] == theirs["identity"]:
        seen = facts.names_here.get(second, Name())
        yield about.problem(
            f"{first} and {second} are one and the same host: {second} leads to {seen.first} on {facts.here}",
            correction(facts.here, second, seen),
        )
    elif mine["host_name"] == theirs["host_name"]:
        yield about.problem(
            f"{first} and {second} both have the host name {mine['host_name']!r}, so launchers count their ranks as of "
            "one host",
            f"rename one: `sudo hostnamectl set-hostname {second}` there, or --hostname of its container",
        )


def _peer(facts: Facts, here: str, there: str, seen: Name) -> Iterator[Finding]:
    about = About(Cause.NAME, here, there)
    owned, name = facts.owned.get(there, {}), facts.peers.get(there, there)
    address = next((address for address in seen.addresses if ":" not in address), "")
    right = _address(facts, there)
    addition = f"add its address to /etc/hosts on {here}{f': `{right} {name}`' if right else ''}"
    if not seen.addresses:
        yield about.problem(f"{here} cannot resolve the name {name} ({seen.error})", addition)
    elif not address:
        text = f"on {here}, {name} has IPv6 addresses only ({seen.first}), and launchers take IPv4"
        yield about.problem(text, addition)
    elif ip_address(address).is_loopback:
        text = f"on {here}, {name} leads to {address}, which is {here} itself"
        yield about.problem(text, correction(here, name, seen, right))
    elif owned and not owned.get(address, True):
        whose = ", which is its own" if facts.owned.get(here, {}).get(address) else ""
        whose += f" ({seen.interface})" if bridge(seen.interface) else ""
        yield about.problem(
            f"on {here}, {name} leads to {address}{whose}, and {name} has no such address (it has "
            f"{_all_addresses(facts, there)})",
            correction(here, name, seen, right),
        )
    elif ":" in seen.first and not owned.get(seen.first, True):
        yield about.warning(
            f"on {here}, {name} leads first to the IPv6 address {seen.first}, which {name} does not have",
            correction(here, name, seen, address),
        )


def _itself(facts: Facts, here: str) -> Iterator[Finding]:
    seen = facts.names[here].get("", Name())
    if seen.addresses and ip_address(seen.first.partition("%")[0]).is_loopback:
        yield About(Cause.NAME, here).warning(
            f"on {here}, its own host name leads to {seen.first}, where no other host reaches what listens by name",
            correction(here, facts.machines[here]["host_name"], seen, _address(facts, here)),
        )


def correction(here: str, name: str, seen: Name, right: str = "") -> str:
    """Return the remedy for a name that leads to a wrong address."""
    place = f"in /etc/hosts on {here}" if seen.in_hosts_file else f"in the DNS, or in /etc/hosts on {here}"
    return f"correct the line of {name} {place}{f': `{right} {name}`' if right else ''}"


def bridge(interface: str) -> bool:
    """Return whether an interface leads to containers or virtual machines on its own host."""
    return re.match(r"docker|br-|veth|virbr|cni|flannel|cali|lxc|lxd|podman|kube", interface) is not None


def into_bridge(here: str, there: str, way: Name) -> tuple[str, str]:
    """Return text and remedy for a way that leads into a bridge."""
    return (
        f"the way from {here} to {there} ({', '.join(way.addresses)}) leads into {way.interface} ({way.own}), a bridge "
        f"to containers on {here}",
        f"`ip route get {way.first}` on {here}; give the bridge another subnet, or correct the address of {there} in "
        f"/etc/hosts on {here}",
    )


def _address(facts: Facts, host: str) -> str:
    """Return the address that a host has on the way to others; empty where it has none but a loopback address."""
    addresses = (way.own for way in facts.names.get(host, {}).values())
    return next((address for address in addresses if address and not ip_address(address).is_loopback), "")


def _all_addresses(facts: Facts, host: str) -> str:
    interfaces = {name: entry for name, entry in facts.interfaces.get(host, {}).items() if name != "lo"}
    addresses = (f"{address} on {name}" for name, entry in interfaces.items() for address in entry["addresses"])
    return ", ".join(addresses) or "none"

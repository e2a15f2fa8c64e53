"""Names of hosts, and what they lead to on each host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_address
from itertools import combinations, permutations

from trainer.ops.doctor.facts import Facts, Name
from trainer.ops.doctor.finding import Cause, Finding, problem, warning


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong with the names of the hosts that answer."""
    yield from _same_host(facts)
    for here, there in permutations([host.name for host in facts.answering], 2):
        seen = facts.names.get(here, {}).get(there)
        if seen is not None:
            yield from _peer(facts, here, there, seen)
    for here in facts.names:
        yield from _own(facts, here)


def _same_host(facts: Facts) -> Iterator[Finding]:
    for one, other in combinations([host.name for host in facts.answering], 2):
        machine, second = facts.machines[one], facts.machines[other]
        if machine["identity"] and machine["identity"] == second["identity"]:
            where = facts.names_here.get(other, Name())
            yield problem(
                Cause.SAME_HOST, (one, other),
                f"{one} and {other} are one and the same host: {other} leads to {_first(where)} on {facts.here}",
                correction(facts.here, other, where),
            )  # fmt: skip
        elif machine["host_name"] == second["host_name"]:
            yield problem(
                Cause.SAME_HOST, (one, other),
                f"{one} and {other} both have the host name {machine['host_name']!r}, so launchers count their ranks "
                "as of one host",
                f"rename one: `sudo hostnamectl set-hostname {other}` there, or --hostname of its container",
            )  # fmt: skip


def _peer(facts: Facts, here: str, there: str, seen: Name) -> Iterator[Finding]:
    own, name = facts.owned.get(there, {}), facts.peers.get(there, there)
    addresses = [address for address in seen.addresses if ":" not in address]
    if not seen.addresses:
        yield problem(
            Cause.NAME, (here, there), f"{here} cannot resolve the name {name} ({seen.error})",
            _addition(facts, here, there),
        )  # fmt: skip
    elif not addresses:
        yield problem(
            Cause.NAME, (here, there), f"on {here}, {name} has IPv6 addresses only ({_first(seen)}), and launchers "
            "take IPv4", _addition(facts, here, there),
        )  # fmt: skip
    elif ip_address(addresses[0]).is_loopback:
        yield problem(
            Cause.NAME, (here, there), f"on {here}, {name} leads to {addresses[0]}, which is {here} itself",
            correction(here, name, seen, _known(facts, there)),
        )  # fmt: skip
    elif own and not own.get(addresses[0], True):
        whose = ", which is its own" if facts.owned.get(here, {}).get(addresses[0]) else ""
        whose += f" ({seen.interface})" if bridge(seen.interface) else ""
        yield problem(
            Cause.NAME, (here, there),
            f"on {here}, {name} leads to {addresses[0]}{whose}, and {name} has no such address (it has "
            f"{_addresses(facts, there)})", correction(here, name, seen, _known(facts, there)),
        )  # fmt: skip
    elif ":" in seen.addresses[0] and not own.get(seen.addresses[0], True):
        yield warning(
            Cause.NAME, (here, there),
            f"on {here}, {name} leads first to the IPv6 address {seen.addresses[0]}, which {name} does not have",
            correction(here, name, seen, addresses[0]),
        )  # fmt: skip


def _own(facts: Facts, here: str) -> Iterator[Finding]:
    seen = facts.names[here].get("")
    if seen is None or not seen.addresses or not ip_address(seen.addresses[0].partition("%")[0]).is_loopback:
        return
    yield warning(
        Cause.NAME, (here,),
        f"on {here}, its own host name leads to {seen.addresses[0]}, where no other host reaches what listens by name",
        correction(here, str(facts.machines[here]["host_name"]), seen, _known(facts, here)),
    )  # fmt: skip


def correction(here: str, name: str, seen: Name, right: str = "") -> str:
    """Return the remedy for a name that leads to a wrong address."""
    place = f"in /etc/hosts on {here}" if seen.in_hosts_file else f"in the DNS, or in /etc/hosts on {here}"
    return f"correct the line of {name} {place}{f': `{right} {name}`' if right else ''}"


def _addition(facts: Facts, here: str, there: str) -> str:
    """Return the remedy for a name that leads nowhere."""
    address = _known(facts, there)
    line = f": `{address} {facts.peers.get(there, there)}`" if address else ""
    return f"add its address to /etc/hosts on {here}{line}"


def bridge(interface: str) -> bool:
    """Return whether an interface leads to containers or virtual machines on its own host."""
    return re.match(r"docker|br-|veth|virbr|cni|flannel|cali|lxc|lxd|podman|kube", interface) is not None


def into_bridge(here: str, there: str, way: Name) -> str:
    """Return the text about a way that leads into a bridge."""
    return (
        f"the way from {here} to {there} ({', '.join(way.addresses)}) leads into {way.interface} ({way.own}), a bridge "
        f"to containers on {here}"
    )


def bridge_remedy(here: str, there: str, way: Name) -> str:
    """Return what to do about it."""
    return (
        f"`ip route get {_first(way)}` on {here}; give the bridge another subnet, or correct the address of {there} in "
        f"/etc/hosts on {here}"
    )


def _first(seen: Name) -> str:
    return seen.addresses[0] if seen.addresses else "nothing"


def _known(facts: Facts, host: str) -> str:
    """Return the address that a host has on the way to others; empty where it has none but a loopback address."""
    own = (way.own for way in facts.names.get(host, {}).values())
    return next((address for address in own if address and not ip_address(address).is_loopback), "")


def _addresses(facts: Facts, host: str) -> str:
    found = [
        f"{address} on {name}"
        for name, entry in facts.interfaces.get(host, {}).items()
        for address in entry["addresses"]
        if name != "lo"
    ]
    return ", ".join(found) or "none"

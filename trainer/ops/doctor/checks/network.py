"""The network between two hosts: which interfaces, and whether bytes get through."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations

from trainer.ops.doctor.checks.names import bridge, bridge_remedy, into_bridge
from trainer.ops.doctor.facts import Facts, Name, Pair
from trainer.ops.doctor.finding import Cause, Finding, problem, warning

_TUNNEL = re.compile(r"tun|tap|wg|ppp|tailscale|zt|ipsec|gre")
SLOW_BYTES_PER_S = 12.5e6
"""100 Mbit/s: the gradients of a model with 25 million parameters take 8 s a step."""
SLOW_SHARE = 0.1
"""Of the interface's own speed."""
ONE_CONNECTION_BYTES_PER_S = 5e9
"""A faster interface is not filled by one connection."""
FAR_S = 0.01
_HEADERS = 52
"""Bytes of an IP packet that are not the TCP segment's: 40, and 12 of the time stamps."""


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong between the hosts that answer."""
    yield from _shared_addresses(facts)
    for one, other in combinations([host.name for host in facts.answering], 2):
        yield from _interfaces(facts, one, other)
        there, back = facts.pairs.get((one, other)), facts.pairs.get((other, one))
        if there is None or back is None:
            continue
        if there.error or back.error:
            yield _unreachable(facts, one, other, there, back)
        elif there.large or back.large:
            yield _too_large(facts, one, other, there if there.large else back)
        else:
            yield from _slow(facts, one, other, there, back)


def _way(facts: Facts, here: str, there: str) -> Name:
    return facts.names.get(here, {}).get(there, Name())


def _interfaces(facts: Facts, one: str, other: str) -> Iterator[Finding]:
    pairs = (facts.pairs.get((one, other)), facts.pairs.get((other, one)))
    for here, there in ((one, other), (other, one)):
        way = _way(facts, here, there)
        if _TUNNEL.match(way.interface):
            yield warning(
                Cause.INTERFACE, (one, other),
                f"the way from {here} to {there} leads through the tunnel {way.interface} ({way.own})",
                f"give {there} its address on the hosts' own network, in /etc/hosts on {here}",
            )  # fmt: skip
        if bridge(way.interface) and (None in pairs or any(pair and pair.error for pair in pairs)):
            yield problem(Cause.INTERFACE, (one, other), into_bridge(here, there, way), bridge_remedy(here, there, way))


def _shared_addresses(facts: Facts) -> Iterator[Finding]:
    owners: dict[str, dict[str, str]] = {}
    for host in facts.answering:
        for address, interface in _by_address(facts, host.name).items():
            owners.setdefault(address, {})[host.name] = interface
    for address, names in sorted(owners.items()):
        hosts = tuple(names)
        if len(hosts) < 2:
            continue
        quantity = "both" if len(hosts) == 2 else "all"
        ways = {_way(facts, here, there).interface for here in hosts for there in hosts if here != there}
        interface = ways.pop() if len(ways) == 1 else ""
        yield warning(
            Cause.INTERFACE, hosts,
            f"{_and(hosts)} {quantity} have the address {address} (on {_and(tuple(names.values()))}), where plain "
            "mpirun may connect to the wrong host",
            f"`mpirun --mca btl_tcp_if_include {interface or 'NETWORK'}`; horovodrun and trainer choose by route",
        )  # fmt: skip


def _and(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _by_address(facts: Facts, host: str) -> dict[str, str]:
    return {
        address: name
        for name, entry in facts.interfaces.get(host, {}).items()
        for address in entry["addresses"]
        if not address.startswith("127.")
    }


def _unreachable(facts: Facts, one: str, other: str, there: Pair, back: Pair) -> Finding:
    if there.error and back.error:
        failures = f"{_failure(there)}, and {_failure(back)}"
        text = f"{one} and {other} cannot connect to each other ({failures}), though ssh works"
        remedy = f"{_let_through(other, back.address)}, and {_let_through(one, there.address)}"
    else:
        here, far, failed, well = (one, other, there, back) if there.error else (other, one, back, there)
        text = f"{here} cannot connect to {far} ({_failure(failed)}), while {far} connects to {here}"
        remedy = _let_through(far, well.address)
    return problem(Cause.REACH, (one, other), f"{text}: a firewall", remedy)


def _failure(pair: Pair) -> str:
    port = next(port for port, error in pair.errors.items() if error)
    others = [str(number) for number, error in pair.errors.items() if not error]
    answers = f", but port {others[0]} answers" if others else ""
    return f"{pair.address} port {port}: {pair.errors[port]}{answers}"


def _let_through(host: str, source: str) -> str:
    return f"on {host}, let all TCP from {source} through: `sudo iptables -I INPUT -p tcp -s {source} -j ACCEPT`"


def _too_large(facts: Facts, one: str, other: str, pair: Pair) -> Finding:
    here, there = (one, other) if facts.pairs.get((one, other)) is pair else (other, one)
    begin, end = (here, there) if pair.large == "to" else (there, here)
    interface = _way(facts, begin, end).interface or "INTERFACE"
    mtu = facts.interfaces.get(begin, {}).get(interface, {}).get("mtu", "unknown")
    fits = f": {pair.segment + _HEADERS} bytes do" if pair.segment else ""
    remedy = f"`sudo ip link set dev {interface} mtu {pair.segment + _HEADERS if pair.segment else 576}` on both"
    return problem(
        Cause.MTU, (one, other),
        f"large packets from {begin} to {end} get lost (the MTU of {interface} is {mtu}, and less gets through{fits})",
        f"{remedy}, or let ICMP 'fragmentation needed' through between them",
    )  # fmt: skip


def _slow(facts: Facts, one: str, other: str, there: Pair, back: Pair) -> Iterator[Finding]:
    latency_s = min(there.latency_s, back.latency_s)
    if latency_s > FAR_S:
        yield warning(
            Cause.SPEED, (one, other), f"a round trip between {one} and {other} takes {latency_s * 1e3:.0f} ms",
            f"`traceroute {other}` on {one} shows the way; hosts of one job belong on one network",
        )  # fmt: skip
    for here, far, pair in ((one, other, there), (other, one, back)):
        speed = link_speed(facts, here, far)
        least = max(SLOW_BYTES_PER_S, SLOW_SHARE * min(speed, ONE_CONNECTION_BYTES_PER_S))
        if pair.bytes_per_s is not None and pair.bytes_per_s < least:
            of = f" of the link's {8 * speed / 1e9:g} Gbit/s" if speed else ""
            yield warning(
                Cause.SPEED, (one, other),
                f"from {far} to {here} come {8 * pair.bytes_per_s / 1e6:.0f} Mbit/s{of}",
                f"`ethtool {_way(facts, far, here).interface}` on {far}, and `iperf3` between them; with gradients "
                "this slow, see docs/scaling.md",
            )  # fmt: skip


def link_speed(facts: Facts, one: str, other: str) -> float:
    """Return the bytes a second of the slower interface between two hosts; 0 where they do not say."""
    speeds = [
        facts.interfaces.get(here, {}).get(_way(facts, here, there).interface, {}).get("speed", 0)
        for here, there in ((one, other), (other, one))
    ]
    return float(min(speeds)) * 1e6 / 8

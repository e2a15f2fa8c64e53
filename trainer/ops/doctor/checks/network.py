"""The network between two hosts: which interfaces, and whether bytes get through."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations

from trainer.ops.doctor.checks.names import bridge, into_bridge
from trainer.ops.doctor.facts import Facts, Pair
from trainer.ops.doctor.finding import About, Cause, Finding

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
    for first, second in combinations([host.name for host in facts.answering], 2):
        there, back = facts.pairs.get((first, second)), facts.pairs.get((second, first))
        fails = there is None or back is None or bool(there.error or back.error)
        yield from _interfaces(facts, first, second, fails=fails)
        if there is None or back is None:
            continue
        if fails:
            yield _unreachable(first, second, there, back)
        elif there.large or back.large:
            yield _too_large(facts, first, second, there, back)
        else:
            yield from _slow(facts, first, second, there, back)


def _interfaces(facts: Facts, first: str, second: str, *, fails: bool) -> Iterator[Finding]:
    about = About(Cause.INTERFACE, first, second)
    for here, there in ((first, second), (second, first)):
        way = facts.way(here, there)
        if _TUNNEL.match(way.interface):
            yield about.warning(
                f"the way from {here} to {there} leads through the tunnel {way.interface} ({way.own})",
                f"give {there} its address on the hosts' own network, in /etc/hosts on {here}",
            )
        if fails and bridge(way.interface):
            yield about.problem(*into_bridge(here, there, way))


def _shared_addresses(facts: Facts) -> Iterator[Finding]:
    owners: dict[str, dict[str, str]] = {}
    for host in facts.answering:
        for interface, entry in facts.interfaces.get(host.name, {}).items():
            for address in entry["addresses"]:
                owners.setdefault(address, {})[host.name] = interface
    for address, interfaces in sorted(owners.items()):
        hosts = list(interfaces)
        if len(hosts) < 2 or address.startswith("127."):
            continue
        quantity = "both" if len(hosts) == 2 else "all"
        ways = {facts.way(here, there).interface for here in hosts for there in hosts if here != there}
        interface = ways.pop() if len(ways) == 1 else ""
        yield About(Cause.INTERFACE, *hosts).warning(
            f"{_and(hosts)} {quantity} have the address {address} (on {_and(list(interfaces.values()))}), where plain "
            "mpirun may connect to the wrong host",
            f"`mpirun --mca btl_tcp_if_include {interface or 'NETWORK'}`; horovodrun and trainer choose by route",
        )


def _and(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _unreachable(first: str, second: str, there: Pair, back: Pair) -> Finding:
    about = About(Cause.REACH, first, second)
    if there.error and back.error:
        return about.problem(
            f"{first} and {second} cannot connect to each other ({_failure(there)}, and {_failure(back)}), though ssh "
            "works: a firewall",
            f"{_let_through(second, back.address)}, and {_let_through(first, there.address)}",
        )
    here, far, failed, well = (first, second, there, back) if there.error else (second, first, back, there)
    return about.problem(
        f"{here} cannot connect to {far} ({_failure(failed)}), while {far} connects to {here}: a firewall",
        _let_through(far, well.address),
    )


def _failure(pair: Pair) -> str:
    port = next(port for port, error in pair.errors.items() if error)
    answering = next((number for number, error in pair.errors.items() if not error), None)
    answers = f", but port {answering} answers" if answering is not None else ""
    return f"{pair.address} port {port}: {pair.errors[port]}{answers}"


def _let_through(host: str, source: str) -> str:
    return f"on {host}, let all TCP from {source} through: `sudo iptables -I INPUT -p tcp -s {source} -j ACCEPT`"


def _too_large(facts: Facts, first: str, second: str, there: Pair, back: Pair) -> Finding:
    here, far, pair = (first, second, there) if there.large else (second, first, back)
    begin, end = (here, far) if pair.large == "to" else (far, here)
    interface = facts.way(begin, end).interface or "INTERFACE"
    mtu = facts.interfaces.get(begin, {}).get(interface, {}).get("mtu", "unknown")
    fitting = pair.segment + _HEADERS if pair.segment else 0
    fits = f": {fitting} bytes do" if fitting else ""
    return About(Cause.MTU, first, second).problem(
        f"large packets from {begin} to {end} get lost (the MTU of {interface} is {mtu}, and less gets through{fits})",
        f"`sudo ip link set dev {interface} mtu {fitting or 576}` on both, or let ICMP 'fragmentation needed' through "
        "between them",
    )


def _slow(facts: Facts, first: str, second: str, there: Pair, back: Pair) -> Iterator[Finding]:
    about = About(Cause.SPEED, first, second)
    latency_s = min(there.latency_s, back.latency_s)
    if latency_s > FAR_S:
        yield about.warning(
            f"a round trip between {first} and {second} takes {latency_s * 1e3:.0f} ms",
            f"`traceroute {second}` on {first} shows the way; hosts of one job belong on one network",
        )
    speed = _link_speed(facts, first, second)
    least = max(SLOW_BYTES_PER_S, SLOW_SHARE * min(speed, ONE_CONNECTION_BYTES_PER_S))
    of_link = f" of the link's {8 * speed / 1e9:g} Gbit/s" if speed else ""
    for here, far, pair in ((first, second, there), (second, first, back)):
        if pair.bytes_per_s is not None and pair.bytes_per_s < least:
            yield about.warning(
                f"from {far} to {here} come {8 * pair.bytes_per_s / 1e6:.0f} Mbit/s{of_link}",
                f"`ethtool {facts.way(far, here).interface}` on {far}, and `iperf3` between them; with gradients this "
                "slow, see docs/scaling.md",
            )


def _link_speed(facts: Facts, first: str, second: str) -> float:
    """Return the bytes a second of the slower interface between two hosts; 0 where they do not say."""
    speeds = [
        facts.interfaces.get(here, {}).get(facts.way(here, there).interface, {}).get("speed", 0)
        for here, there in ((first, second), (second, first))
    ]
    return float(min(speeds)) * 1e6 / 8

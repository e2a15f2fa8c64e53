"""Every ordered pair of hosts: where the one listens, and how bytes get there from the other."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from ipaddress import ip_address
from itertools import permutations
from typing import Any

from trainer.ops.doctor.agent.exchange import TOKEN_BYTES
from trainer.ops.doctor.connection import AgentError, Connection
from trainer.ops.doctor.facts import Facts, Name, Pair, to_name
from trainer.ops.doctor.progress import Progress

_CALL_S, _CONNECT_S, _BANDWIDTH_S = 5.0, 3.0, 0.3
_PROBE_S = 12.0
"""More than all timeouts of a probe together."""
_LEAST_BANDWIDTH_S = 3.0
"""Without this much time left, bandwidths are not measured."""
_WORKERS = 64


def look_at_pairs(facts: Facts, connections: Mapping[str, Connection], deadline: float, progress: Progress) -> Facts:
    """Return the facts with names, addresses and pairs of the hosts whose agents answer."""
    if len(connections) < 2:
        return facts
    progress.show(f"connecting {len(connections)} hosts with one another")
    failures: list[str] = []
    facts = _with_names(facts, connections, failures)
    pairs = _probe(facts, connections, failures)
    if deadline - time.monotonic() > _LEAST_BANDWIDTH_S:
        progress.show("measuring bandwidths")
        pairs = _with_bandwidths(pairs, connections, deadline)
    return replace(facts, pairs={ends: probed.pair for ends, probed in pairs.items()},
                   incomplete=(*facts.incomplete, *failures))  # fmt: skip


def _with_names(facts: Facts, connections: Mapping[str, Connection], failures: list[str]) -> Facts:
    peers = {name: facts.peers[name] for name in connections}

    def resolve(name: str) -> tuple[str, dict[str, Name]]:
        own = facts.machines.get(name, {}).get("host_name", "")
        asked = [*peers.values(), own]
        try:
            answer = connections[name].call("resolve", _CALL_S + 5, names=asked)
        except AgentError as error:
            failures.append(str(error))
            return name, {}
        seen = {title: to_name(entry) for title, entry in answer.items()}
        by_host = {host: seen[peer] for host, peer in peers.items()}
        return name, by_host | {"": seen[own]}  # its own name for itself stands under the empty one

    with ThreadPoolExecutor(max_workers=_WORKERS) as pool:
        names = dict(pool.map(resolve, connections))
    owned: dict[str, dict[str, bool]] = {}
    for host, connection in connections.items():
        asked = sorted({address for seen in names.values() if host in seen for address in seen[host].addresses})
        try:
            owned[host] = connection.call("owns", _CALL_S, addresses=asked)
        except AgentError as error:
            failures.append(str(error))
    return replace(facts, names=names, owned=owned)


@dataclass(frozen=True)
class _Probed:
    pair: Pair
    ports: tuple[int, ...]
    token: str


def _probe(facts: Facts, connections: Mapping[str, Connection], failures: list[str]) -> dict[tuple[str, str], _Probed]:
    listening = _listen(facts, connections, failures)

    def probe(ends: tuple[str, str]) -> tuple[tuple[str, str], _Probed] | None:
        here, there = ends
        address = address_for(facts, there, here)
        if (there, address) not in listening:
            return None
        ports, token = listening[there, address]
        try:
            answer = connections[here].call(
                "probe", _PROBE_S, address=address, ports=ports, token=token, wait_s=_CONNECT_S
            )
        except AgentError as error:
            failures.append(str(error))
            return None
        return ends, _Probed(_to_pair(address, answer), tuple(ports), token)

    with ThreadPoolExecutor(max_workers=_WORKERS) as pool:
        found = pool.map(probe, permutations(connections, 2))
        return dict(entry for entry in found if entry is not None)


def _listen(
    facts: Facts, connections: Mapping[str, Connection], failures: list[str]
) -> dict[tuple[str, str], tuple[list[int], str]]:
    """Make each host listen on its addresses on the ways to the others; return ports and token by host and address."""
    listening: dict[tuple[str, str], tuple[list[int], str]] = {}
    for there, here in permutations(connections, 2):
        address = address_for(facts, there, here)
        if not address or (there, address) in listening:
            continue
        token = secrets.token_hex(TOKEN_BYTES // 2)
        try:
            ports = connections[there].call("listen", _CALL_S, address=address, token=token)
        except AgentError as error:
            failures.append(str(error))
        else:
            listening[there, address] = ports, token
    return listening


def address_for(facts: Facts, there: str, here: str) -> str:
    """Return the address at which `there` waits for `here`: its own on the way to it, as a job chooses it.

    Empty where it has none but a loopback address.
    """
    seen = facts.names.get(there, {}).get(here)
    if seen is None or not seen.own or ip_address(seen.own).is_loopback:
        return ""
    return seen.own


def _to_pair(address: str, answer: Mapping[str, Any]) -> Pair:
    return Pair(
        address=address, errors={int(port): error for port, error in answer["errors"].items()},
        latency_s=answer["latency_s"], large=answer["large"], segment=answer["segment"],
    )  # fmt: skip


def _with_bandwidths(
    pairs: Mapping[tuple[str, str], _Probed], connections: Mapping[str, Connection], deadline: float
) -> dict[tuple[str, str], _Probed]:
    """Measure in rounds in which every host sends to one other and receives from one other."""
    names, found = list(connections), dict(pairs)

    def measure(ends: tuple[str, str]) -> tuple[tuple[str, str], _Probed]:
        probed = found[ends]
        arguments = {"address": probed.pair.address, "port": probed.ports[0], "token": probed.token}
        try:
            rate = connections[ends[0]].call("bandwidth", _CALL_S, seconds=_BANDWIDTH_S, **arguments)
        except AgentError:
            return ends, probed
        return ends, replace(probed, pair=replace(probed.pair, bytes_per_s=rate))

    for shift in range(1, len(names)):
        if deadline - time.monotonic() < _LEAST_BANDWIDTH_S:
            break
        ring = [(name, names[(at + shift) % len(names)]) for at, name in enumerate(names)]
        well = [ends for ends in ring if ends in found and not (found[ends].pair.error or found[ends].pair.large)]
        with ThreadPoolExecutor(max_workers=_WORKERS) as pool:
            found |= dict(pool.map(measure, well))
    return found

"""Collect the facts: start an agent on each host, ask it about the host, and have agents try the network and GPUs."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import pairwise, permutations, product
from pathlib import Path
from typing import Any, TypeVar

from trainer.errors import ConfigError
from trainer.ops.doctor.agent import network
from trainer.ops.doctor.connection import NO_ANSWER, AgentError, Connection, ssh_settings
from trainer.ops.doctor.facts import AllReduce, Facts, HostFacts, Name, Pair
from trainer.ops.supervise.hosts import Host

ALL_REDUCE = Path(__file__).with_name("all_reduce.py")
_LOGIN_PART = 0.45
"""Share of the time that logins may take."""
_RETRY_S = 4.0
_CALL_S = 5.0
_PROBE_S, _CONNECT_S, _BANDWIDTH_S = 12.0, 3.0, 0.3
"""The first is more than all timeouts of a probe together."""
_LEAST_BANDWIDTH_S = 3.0
"""Without this much time left, bandwidths are not measured."""
_ALL_REDUCES_S, _ALL_REDUCE_LIMIT_S, _ALL_REDUCE_LEAST_S = 60.0, 30.0, 10.0
"""For all of them together, after all else; for each; and without this much time left, another one is not begun."""
_CLOCK_READINGS = 3
_MOST_THREADS = 64

Connections = Mapping[HostFacts, Connection]
"""To the agents that answer."""
Ends = tuple[HostFacts, HostFacts]
"""The host that connects, and the host that listens."""
T = TypeVar("T")
K = TypeVar("K")


def look(hosts: Sequence[Host], script: str, timeout_s: float, *, with_gpus: bool) -> Facts:
    """Return the facts that could be collected within the time that was given.

    Args:
        hosts: those to look at.
        script: the training script, which is compared; empty without one.
        timeout_s: seconds for all but the all-reduces between GPUs.
        with_gpus: whether to look at the GPUs too.

    Raises:
        ConfigError: ssh is not installed.
    """
    deadline = time.monotonic() + timeout_s
    names = [host.name for host in hosts]
    elsewhere = next((host.name for host in hosts if not host.is_here), None)
    if elsewhere is not None and shutil.which("ssh") is None:
        raise ConfigError(f"-H names {elsewhere}, and there is no ssh to reach it; install openssh-client")
    with ExitStack() as at_end:
        at_end.callback(show_progress, "")
        show_progress(f"logging in to {', '.join(names)}")
        with ThreadPoolExecutor(1) as pool:  # a name server that is dead takes its time beside the logins
            resolving = pool.submit(network.resolve, names)
            entered = dict(_at_once(lambda host: _enter(host, timeout_s, with_gpus=with_gpus), hosts).values())
        at_end.callback(_at_once, Connection.close, entered.values())
        for host in entered:
            host.seen_here = Name(**resolving.result()[host.name])
        owns = network.owns([address for host in entered for address in host.seen_here.addresses])
        own_addresses = frozenset(address for address, is_own in owns.items() if is_own)
        facts = Facts(hosts=tuple(entered), here=socket.gethostname(), script=script, own_addresses=own_addresses)
        connections = {host: connection for host, connection in entered.items() if not host.login.error}
        _ask(facts, connections, with_gpus=with_gpus)
        if len(connections) > 1:
            _resolve_names(facts, connections)
            _connect_pairs(facts, connections, deadline)
        if with_gpus:
            try_all_reduces(facts, connections)
    return facts


def show_progress(text: str) -> None:
    """Say on a terminal what is being done, in a line that the next one replaces and an empty text takes away."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{f'trainer doctor: {text} …' if text else ''}")
        sys.stderr.flush()


def _at_once(call: Callable[[K], T], keys: Iterable[K]) -> dict[K, T]:
    """Call a function for all keys at the same time; return its values."""
    keys = list(keys)
    with ThreadPoolExecutor(_MOST_THREADS) as pool:
        return dict(zip(keys, pool.map(call, keys), strict=True))


def _answers(facts: Facts, ask: Callable[[K], T], keys: Iterable[K]) -> dict[K, T]:
    """Call a function that asks agents for all keys at the same time; return its values where they have answered.

    The errors of the others are noted among the facts.
    """
    with ThreadPoolExecutor(_MOST_THREADS) as pool:
        futures = {key: pool.submit(ask, key) for key in keys}
    answers = {}
    for key, future in futures.items():
        try:
            answers[key] = future.result()
        except AgentError as error:
            facts.incomplete += (str(error),)
    return answers


def _enter(host: Host, timeout_s: float, *, with_gpus: bool) -> tuple[HostFacts, Connection]:
    """Start an agent on a host; return how that went, and the connection."""
    all_s = timeout_s + (_ALL_REDUCES_S if with_gpus else 0.0)
    connection = Connection(host, _LOGIN_PART * timeout_s, all_s)
    login = connection.login()
    if not host.is_here:
        if login.error == NO_ANSWER:
            connection.close()
            connection = Connection(host, _RETRY_S, all_s, in_small_segments=True)
            again = connection.login()
            login = login if again.error else again
        login = replace(login, settings=ssh_settings(host))
    peer = socket.gethostname() if host.is_here else host.name
    return HostFacts(name=host.name, slots=host.slots, is_here=host.is_here, login=login, peer=peer), connection


def _ask(facts: Facts, connections: Connections, *, with_gpus: bool) -> None:
    """Ask each agent about its host."""
    show_progress("reading versions and limits")
    folder = str(Path.cwd())
    job = {"folder": folder, "script": facts.script, "python_path": os.environ.get("PYTHONPATH", "")}
    questions = {"machine": {"folder": folder}, "software": job, "interfaces": {}} | ({"gpus": {}} if with_gpus else {})

    def ask(key: tuple[HostFacts, str]) -> None:
        host, question = key
        setattr(host, question, connections[host].call(question, _CALL_S, **questions[question]))

    _answers(facts, lambda host: _compare_clocks(host, connections[host]), connections)
    _answers(facts, ask, product(connections, questions))


def _compare_clocks(host: HostFacts, connection: Connection) -> None:
    """Find out by how many seconds the host's clock is ahead of ours, from the fastest of some readings."""
    readings = []
    for _ in range(_CLOCK_READINGS):
        before = time.time()
        there = connection.call("clock", _CALL_S)
        after = time.time()
        readings.append((after - before, there - (before + after) / 2))
    _, host.seconds_ahead = min(readings)


def _resolve_names(facts: Facts, connections: Connections) -> None:
    """Let each agent resolve the names of all hosts, and then say which of these addresses are its own."""
    show_progress(f"connecting {len(connections)} hosts with one another")

    def resolve(host: HostFacts) -> None:
        names = {other.name: other.peer for other in connections} | {"": host.machine.get("host_name", "")}
        seen = connections[host].call("resolve", _CALL_S + 5, names=list(names.values()))
        host.names = {key: Name(**seen[name]) for key, name in names.items()}

    def find_own(host: HostFacts) -> None:
        addresses = {address for other in connections for address in other.way(host).addresses}
        host.owned = connections[host].call("owns", _CALL_S, addresses=sorted(addresses))

    _answers(facts, resolve, connections)
    _answers(facts, find_own, connections)


def _connect_pairs(facts: Facts, connections: Connections, deadline: float) -> None:
    """Let each agent listen at its addresses on the ways to the others, and connect to those of the others."""
    token = secrets.token_hex(network.TOKEN_BYTES // 2)
    # Where the second host of each pair listens for the first one.
    places = {ends: (ends[1], ends[1].way(ends[0]).reachable_source) for ends in permutations(connections, 2)}

    def listen(place: tuple[HostFacts, str]) -> list[int]:
        host, address = place
        return list(connections[host].call("listen", _CALL_S, address=address, token=token))

    def probe(ends: Ends) -> Pair:
        arguments = {"address": places[ends][1], "ports": ports[places[ends]], "token": token, "wait_s": _CONNECT_S}
        return Pair(address=places[ends][1], **connections[ends[0]].call("probe", _PROBE_S, **arguments))

    ports = _answers(facts, listen, dict.fromkeys(place for place in places.values() if place[1]))
    pairs = _answers(facts, probe, [ends for ends, place in places.items() if place in ports])
    _measure_bandwidths(pairs, connections, token, deadline)
    facts.pairs = {(host.name, other.name): pair for (host, other), pair in pairs.items()}


def _measure_bandwidths(pairs: Mapping[Ends, Pair], connections: Connections, token: str, deadline: float) -> None:
    """Measure in rounds in which every host sends to one other and receives from one other."""
    show_progress("measuring bandwidths")
    hosts = list(connections)

    def measure(ends: Ends) -> None:
        pair = pairs[ends]
        port = int(next(iter(pair.errors)))
        arguments = {"address": pair.address, "port": port, "token": token, "seconds": _BANDWIDTH_S}
        with suppress(AgentError):
            pair.bytes_per_s = connections[ends[0]].call("bandwidth", _CALL_S, **arguments)

    for shift in range(1, len(hosts)):
        if deadline - time.monotonic() > _LEAST_BANDWIDTH_S:
            ring = zip(hosts, [*hosts[shift:], *hosts[:shift]], strict=True)
            _at_once(measure, [ends for ends in ring if ends in pairs and pairs[ends].is_well])


def try_all_reduces(facts: Facts, connections: Connections) -> None:
    """Add all-reduces between GPUs of one host, on all hosts at once, then between neighbours, to the facts."""
    until = time.monotonic() + _ALL_REDUCES_S
    gpus = {host: len(host.gpus.get("query", "").splitlines()) for host in connections if host.versions.get("CUDA")}

    def within(host: HostFacts) -> AllReduce:
        return all_reduce({host.name: connections[host]}, "nccl", limit_s=_ALL_REDUCE_LIMIT_S)

    def between(ends: Ends) -> AllReduce:
        host, other = ends
        both = {end.name: connections[end] for end in ends}
        interfaces = host.way(other).interface, other.way(host).interface
        return all_reduce(both, "nccl", address=host.way(other).reachable_source, interfaces=interfaces, limit_s=left)

    if alone := [host for host, count in gpus.items() if count >= 2]:
        show_progress("summing between two GPUs of a host")
    facts.all_reduces = tuple(_answers(facts, within, alone).values())
    for host, other in pairwise(host for host, count in gpus.items() if count):
        left = min(_ALL_REDUCE_LIMIT_S, until - time.monotonic() - _CALL_S)
        names = host.name, other.name
        pairs = [facts.pairs[ends] for ends in (names, names[::-1]) if ends in facts.pairs]
        if host.way(other).reachable_source and left >= _ALL_REDUCE_LEAST_S and all(pair.is_well for pair in pairs):
            show_progress(f"summing between GPUs of {' and '.join(names)}")
            facts.all_reduces += tuple(_answers(facts, between, [(host, other)]).values())


def all_reduce(
    connections: Mapping[str, Connection],
    backend: str,
    *,
    limit_s: float,
    address: str = "",
    interfaces: tuple[str, str] = ("", ""),
) -> AllReduce:
    """Return an all-reduce of two ranks.

    Args:
        connections: by the host's name, to one host, which runs both ranks, or to two.
        backend: "nccl", or "gloo" between CPUs.
        limit_s: seconds after which the ranks are killed.
        address: where the first of two hosts waits for the second.
        interfaces: of the two hosts, on the way to each other.

    Raises:
        AgentError: an agent could not try it.
    """
    parts: dict[str, dict[str, Any]] = {host: {"ranks": [0, 1], "store": "", "interface": ""} for host in connections}
    if len(connections) == 2:
        port = next(iter(connections.values())).call("free_port", _CALL_S, address=address)
        for rank, part in enumerate(parts.values()):
            part |= {"ranks": [rank], "store": f"tcp://{address}:{port}", "interface": interfaces[rank]}
    shared = {"source": ALL_REDUCE.read_text(), "backend": backend, "size": 2, "limit_s": limit_s}
    answers = _at_once(
        lambda host: connections[host].call("all_reduce", limit_s + _CALL_S, **shared, **parts[host]), connections
    )
    return AllReduce(
        hosts=tuple(connections),
        outputs=tuple(text for answer in answers.values() for text in answer["outputs"]),
        was_killed=any(answer["killed"] for answer in answers.values()),
        limit_s=limit_s,
    )

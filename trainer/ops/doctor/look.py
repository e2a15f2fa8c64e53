"""Collect the facts: start an agent on each host, ask it about the host, and have agents try the network and GPUs."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from ipaddress import ip_address
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any, TypeVar

from trainer.errors import ConfigError
from trainer.ops.doctor.agent import addresses as agent_addresses
from trainer.ops.doctor.agent.exchange import TOKEN_BYTES
from trainer.ops.doctor.connection import NO_ANSWER, AgentError, Connection, ssh_settings
from trainer.ops.doctor.facts import AllReduce, Facts, Login, Name, Pair
from trainer.ops.doctor.options import Options
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

Connections = Mapping[str, Connection]
"""To the agents, by host."""
Ends = tuple[str, str]
"""The host that connects, and the one that listens."""
T = TypeVar("T")
K = TypeVar("K")


def look(options: Options) -> Facts:
    """Return what was found out within the time that was given.

    Raises:
        ConfigError: ssh is not installed.
    """
    deadline = time.monotonic() + options.timeout_s
    names = [host.name for host in options.hosts]
    elsewhere = next((host.name for host in options.hosts if not host.is_here), None)
    if elsewhere is not None and shutil.which("ssh") is None:
        raise ConfigError(f"-H names {elsewhere}, and there is no ssh to reach it; install openssh-client")
    show_progress(f"logging in to {', '.join(names)}")
    with ThreadPoolExecutor(1) as pool:  # a name server that is dead takes its time beside the logins
        resolving = pool.submit(agent_addresses.resolve, names)
        entered = _at_once(lambda host: _enter(host, options), options.hosts)
    try:
        logins = {host.name: login for host, (login, _) in entered.items()}
        connections = {host.name: agent for host, (login, agent) in entered.items() if not login.error}
        names_here = _to_names(resolving.result())
        owns = agent_addresses.owns([address for seen in names_here.values() for address in seen.addresses])
        facts = Facts(
            hosts=options.hosts,
            here=socket.gethostname(),
            script=options.script,
            logins=logins,
            names_here=names_here,
            own_addresses=frozenset(address for address, is_own in owns.items() if is_own),
            peers={host.name: socket.gethostname() if host.is_here else host.name for host in options.hosts},
        )
        facts = _ask(facts, options, connections)
        if len(connections) > 1:
            facts = _look_at_pairs(facts, connections, deadline)
        return try_all_reduces(facts, connections) if options.with_gpus else facts
    finally:
        _at_once(lambda host: entered[host][1].close(), entered)


def show_progress(text: str) -> None:
    """Say on a terminal what is being done, in a line that the next one replaces and an empty text takes away."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{f'trainer doctor: {text} …' if text else ''}")
        sys.stderr.flush()


def _at_once(ask: Callable[[K], T], keys: Iterable[K]) -> dict[K, T]:
    """Call a function for all keys at the same time; return its values."""
    keys = list(keys)
    with ThreadPoolExecutor(max_workers=min(64, len(keys) or 1)) as pool:
        return dict(zip(keys, pool.map(ask, keys), strict=True))


def _answered(facts: Facts, ask: Callable[[K], T], keys: Iterable[K]) -> tuple[Facts, dict[K, T]]:
    """Call a function that asks agents for all keys at the same time.

    Returns:
        The facts with what could not be looked at, and the values of the other keys.
    """

    def try_it(key: K) -> T | AgentError:
        try:
            return ask(key)
        except AgentError as error:
            return error

    values = _at_once(try_it, keys)
    failures = [str(value) for value in values.values() if isinstance(value, AgentError)]
    facts = replace(facts, incomplete=(*facts.incomplete, *failures))
    return facts, {key: value for key, value in values.items() if not isinstance(value, AgentError)}


def _to_names(answer: Mapping[str, Mapping[str, Any]]) -> dict[str, Name]:
    return {name: Name(**{**entry, "addresses": tuple(entry["addresses"])}) for name, entry in answer.items()}


def _enter(host: Host, options: Options) -> tuple[Login, Connection]:
    """Start an agent on a host; return how that went, and the connection."""
    all_s = options.timeout_s + (_ALL_REDUCES_S if options.with_gpus else 0.0)
    connection = Connection(host, _LOGIN_PART * options.timeout_s, all_s)
    login = connection.login()
    if host.is_here:
        return replace(login, printed=""), connection
    if login.error == NO_ANSWER:
        connection.close()
        connection = Connection(host, _RETRY_S, all_s, in_small_segments=True)
        again = connection.login()
        login = login if again.error else replace(again, in_small_segments=True)
    return replace(login, **ssh_settings(host)), connection


def _ask(facts: Facts, options: Options, connections: Connections) -> Facts:
    """Ask each agent about its host."""
    show_progress("reading versions and limits")
    folder = str(Path.cwd())
    about = {"folder": folder, "script": options.script, "python_path": os.environ.get("PYTHONPATH", "")}
    questions = {"machine": {"folder": folder}, "software": about, "interfaces": {}}
    questions |= {"gpus": {}} if options.with_gpus else {}
    clocks = _at_once(lambda host: _ahead(connections[host]), connections)
    facts, answers = _answered(
        facts,
        lambda asked: connections[asked[0]].call(asked[1], _CALL_S, **questions[asked[1]]),
        [(host, question) for host in connections for question in questions],
    )

    def of(question: str) -> dict[str, Any]:
        return {host: answer for (host, asked), answer in answers.items() if asked == question}

    machines, software, interfaces, gpus = map(of, ("machine", "software", "interfaces", "gpus"))
    return replace(facts, clocks=clocks, machines=machines, software=software, interfaces=interfaces, gpus=gpus)


def _ahead(connection: Connection) -> float:
    """Return by how many seconds the host's clock is ahead of ours, from the fastest of some readings."""
    readings = []
    for _ in range(_CLOCK_READINGS):
        before = time.time()
        try:
            there = connection.call("clock", _CALL_S)
        except AgentError:
            return 0.0
        after = time.time()
        readings.append((after - before, there - (before + after) / 2))
    return float(min(readings)[1])


def _look_at_pairs(facts: Facts, connections: Connections, deadline: float) -> Facts:
    """Let each agent listen at its addresses, and connect to those of the others."""
    show_progress(f"connecting {len(connections)} hosts with one another")
    facts = _with_names(facts, connections)
    facts, listening = _listen(facts, connections)

    def probe(ends: Ends) -> Pair:
        here, there = ends
        address = _address_for(facts, there, here)
        ports, token = listening[there, address]
        arguments = {"address": address, "ports": ports, "token": token, "wait_s": _CONNECT_S}
        answer = connections[here].call("probe", _PROBE_S, **arguments)
        answer["errors"] = {int(port): error for port, error in answer["errors"].items()}
        return Pair(address=address, **answer)

    every_two = permutations(connections, 2)
    reachable = [(here, there) for here, there in every_two if (there, _address_for(facts, there, here)) in listening]
    facts, pairs = _answered(facts, probe, reachable)
    return replace(facts, pairs=_with_bandwidths(pairs, connections, listening, deadline))


def _with_names(facts: Facts, connections: Connections) -> Facts:
    peers = {host: facts.peers[host] for host in connections}

    def resolve(here: str) -> dict[str, Name]:
        itself = facts.machines.get(here, {}).get("host_name", "")
        names = _to_names(connections[here].call("resolve", _CALL_S + 5, names=[*peers.values(), itself]))
        return {"": names[itself], **{host: names[peer] for host, peer in peers.items()}}

    def owns(there: str) -> dict[str, bool]:
        addresses = {address for seen in names.values() for address in seen[there].addresses}
        return dict(connections[there].call("owns", _CALL_S, addresses=sorted(addresses)))

    facts, names = _answered(facts, resolve, connections)
    facts, owned = _answered(facts, owns, connections)
    return replace(facts, names=names, owned=owned)


Listening = Mapping[tuple[str, str], tuple[list[int], str]]
"""Ports and token, by host and address."""


def _listen(facts: Facts, connections: Connections) -> tuple[Facts, Listening]:
    """Make each host listen on its addresses on the ways to the others."""

    def listen(place: tuple[str, str]) -> tuple[list[int], str]:
        host, address = place
        token = secrets.token_hex(TOKEN_BYTES // 2)
        return connections[host].call("listen", _CALL_S, address=address, token=token), token

    places = {(there, _address_for(facts, there, here)): None for there, here in permutations(connections, 2)}
    return _answered(facts, listen, [(there, address) for there, address in places if address])


def _address_for(facts: Facts, there: str, here: str) -> str:
    """Return the address at which `there` waits for `here`: its own on the way to it, as a job chooses it.

    Empty where it has none but a loopback address.
    """
    address = facts.way(there, here).own
    return "" if not address or ip_address(address).is_loopback else address


def _with_bandwidths(
    pairs: Mapping[Ends, Pair], connections: Connections, listening: Listening, deadline: float
) -> dict[Ends, Pair]:
    """Measure in rounds in which every host sends to one other and receives from one other."""
    show_progress("measuring bandwidths")
    names, measured = list(connections), dict(pairs)

    def measure(ends: Ends) -> Pair:
        here, there = ends
        pair = pairs[ends]
        ports, token = listening[there, pair.address]
        arguments = {"address": pair.address, "port": ports[0], "token": token, "seconds": _BANDWIDTH_S}
        try:
            return replace(pair, bytes_per_s=connections[here].call("bandwidth", _CALL_S, **arguments))
        except AgentError:
            return pair

    for shift in range(1, len(names)):
        if deadline - time.monotonic() <= _LEAST_BANDWIDTH_S:
            break
        ring = [(name, names[(at + shift) % len(names)]) for at, name in enumerate(names)]
        well = [ends for ends in ring if ends in pairs and not (pairs[ends].error or pairs[ends].large)]
        measured |= _at_once(measure, well)
    return measured


def try_all_reduces(facts: Facts, connections: Connections) -> Facts:
    """Return the facts with all-reduces between GPUs of one host, on all hosts at once, then between neighbours."""
    until = time.monotonic() + _ALL_REDUCES_S
    gpus = {host: len(facts.gpus.get(host, {}).get("query", "").splitlines()) for host in connections}
    gpus = {host: count for host, count in gpus.items() if count and facts.versions(host).get("CUDA")}

    def within(host: str) -> AllReduce:
        return all_reduce({host: connections[host]}, "nccl", limit_s=_ALL_REDUCE_LIMIT_S)

    if alone := [host for host, count in gpus.items() if count >= 2]:
        show_progress("summing between two GPUs of a host")
    facts, tried = _answered(facts, within, alone)
    all_reduces = list(tried.values())
    for ends in pairwise(gpus):
        left = min(_ALL_REDUCE_LIMIT_S, until - time.monotonic() - _CALL_S)
        address = _address_for(facts, *ends)
        pairs = [facts.pairs[way] for way in (ends, ends[::-1]) if way in facts.pairs]
        if not address or left < _ALL_REDUCE_LEAST_S or any(pair.error or pair.large for pair in pairs):
            continue  # where bytes do not get through, that is the finding
        show_progress(f"summing between GPUs of {' and '.join(ends)}")
        both = {host: connections[host] for host in ends}
        interfaces = facts.way(*ends).interface, facts.way(*ends[::-1]).interface
        try:
            all_reduces.append(all_reduce(both, "nccl", address=address, interfaces=interfaces, limit_s=left))
        except AgentError as error:
            facts = replace(facts, incomplete=(*facts.incomplete, str(error)))
    return replace(facts, all_reduces=tuple(all_reduces))


def all_reduce(
    connections: Connections, backend: str, *, limit_s: float, address: str = "", interfaces: tuple[str, str] = ("", "")
) -> AllReduce:
    """Return an all-reduce of two ranks.

    Args:
        connections: to one host, which runs both ranks, or to two.
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

"""Finds the facts out: starts an agent on each host and asks them all."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from trainer.errors import ConfigError
from trainer.ops.doctor.agent import addresses as agent_addresses
from trainer.ops.doctor.connection import NO_ANSWER, AgentError, Connection, ssh_settings
from trainer.ops.doctor.facts import Facts, Login, to_name
from trainer.ops.doctor.gpu_pairs import try_all_reduces
from trainer.ops.doctor.options import Options
from trainer.ops.doctor.pairs import look_at_pairs
from trainer.ops.doctor.progress import Progress
from trainer.ops.supervise.hosts import Host

_LOGIN_PART = 0.45
"""Share of the time that logins may take."""
_RETRY_S = 4.0
_FACTS_S = 5.0
_CLOCK_READINGS = 3

T = TypeVar("T")


def look(options: Options, progress: Progress) -> Facts:
    """Return what was found out within the time that was given.

    Raises:
        ConfigError: ssh is not installed.
    """
    deadline = time.monotonic() + options.timeout_s
    others = [host for host in options.hosts if not host.is_here]
    if others and shutil.which("ssh") is None:
        raise ConfigError(f"-H names {others[0].name}, and there is no ssh to reach it; install openssh-client")
    progress.show(f"logging in to {', '.join(host.name for host in options.hosts)}")
    with ThreadPoolExecutor(1) as pool:  # a name server that is dead takes its time beside the logins
        resolving = pool.submit(agent_addresses.resolve, [host.name for host in options.hosts])
        entered = _enter(options)
    names_here = resolving.result()
    started = {name: connection for name, (_, connection) in entered.items()}
    try:
        logins = {name: login for name, (login, _) in entered.items()}
        connections = {name: connection for name, connection in started.items() if not logins[name].error}
        facts = Facts(
            hosts=options.hosts, here=socket.gethostname(), logins=logins,
            names_here={name: to_name(entry) for name, entry in names_here.items()},
            own_addresses=_own_addresses(names_here), peers={host.name: peer_name(host) for host in options.hosts},
        )  # fmt: skip
        progress.show("reading versions and limits")
        facts = _ask(facts, options, connections)
        facts = look_at_pairs(facts, connections, deadline, progress)
        if options.with_gpus:
            facts = try_all_reduces(facts, connections, progress)
        return facts
    finally:
        on_all(started, Connection.close)


def on_all(connections: Mapping[str, Connection], ask: Callable[[Connection], T]) -> dict[str, T]:
    """Ask all agents at the same time; return the answers by host."""
    with ThreadPoolExecutor(max_workers=max(1, len(connections))) as pool:
        return dict(zip(connections, pool.map(ask, connections.values()), strict=True))


def peer_name(host: Host) -> str:
    """Return the name by which other hosts know this one."""
    return socket.gethostname() if host.is_here else host.name


def _enter(options: Options) -> dict[str, tuple[Login, Connection]]:
    """Start an agent on each host; return how that went, and the connections."""

    def enter(host: Host) -> tuple[Login, Connection]:
        all_s = options.timeout_s + options.all_reduce_s
        connection = Connection(host, _LOGIN_PART * options.timeout_s, all_s)
        login = connection.login()
        if login.error == NO_ANSWER and not host.is_here:
            connection.close()
            connection = Connection(host, _RETRY_S, all_s, in_small_segments=True)
            again = connection.login()
            login = login if again.error else replace(again, in_small_segments=True)
        return _with_settings(login, host), connection

    with ThreadPoolExecutor(max_workers=len(options.hosts)) as pool:
        return dict(zip((host.name for host in options.hosts), pool.map(enter, options.hosts), strict=True))


def _with_settings(login: Login, host: Host) -> Login:
    if host.is_here:
        return replace(login, printed="")
    settings = ssh_settings(host)
    return replace(
        login, user=settings.get("user", ""), key=settings.get("identityfile", ""), port=settings.get("port", "22"),
        address=settings.get("hostname", host.name),
        known_hosts=settings.get("userknownhostsfile", "").partition(" ")[0],
    )  # fmt: skip


def _ask(facts: Facts, options: Options, connections: Mapping[str, Connection]) -> Facts:
    folder = str(Path.cwd())
    about = {"folder": folder, "script": options.script, "python_path": os.environ.get("PYTHONPATH", "")}
    questions: dict[str, tuple[str, dict[str, Any]]] = {
        "machines": ("machine", {"folder": folder}),
        "software": ("software", about),
        "interfaces": ("interfaces", {}),
    }
    if options.with_gpus:
        questions["gpus"] = ("gpus", {})
    failures: list[str] = []

    def ask(connection: Connection) -> dict[str, Any]:
        answers: dict[str, Any] = {"ahead": _ahead(connection)}
        for name, (operation, arguments) in questions.items():
            try:
                answers[name] = connection.call(operation, _FACTS_S, **arguments)
            except AgentError as error:
                failures.append(str(error))
        return answers

    found = on_all(connections, ask)
    by_question = {name: {host: one[name] for host, one in found.items() if name in one} for name in questions}
    return replace(
        facts, clocks={host: answers["ahead"] for host, answers in found.items()}, incomplete=tuple(failures),
        machines=by_question["machines"], software=by_question["software"], interfaces=by_question["interfaces"],
        gpus=by_question.get("gpus", {}),
    )  # fmt: skip


def _ahead(connection: Connection) -> float:
    """Return by how many seconds the host's clock is ahead of ours, from the fastest of some readings."""
    readings = []
    for _ in range(_CLOCK_READINGS):
        before = time.time()
        try:
            there = connection.call("clock", _FACTS_S)
        except AgentError:
            return 0.0
        after = time.time()
        readings.append((after - before, there - (before + after) / 2))
    return float(min(readings)[1])


def _own_addresses(found: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    addresses: Sequence[str] = [address for entry in found.values() for address in entry["addresses"]]
    return frozenset(address for address, is_own in agent_addresses.owns(list(addresses)).items() if is_own)

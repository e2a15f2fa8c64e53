"""Collect the facts: a call to each host that looks at it, and one that tries the network between the hosts."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from trainer.errors import ConfigError
from trainer.ops.doctor.call import NO_ANSWER, Call, CallError
from trainer.ops.doctor.checks import Facts, HostFacts, Way
from trainer.ops.doctor.remote.host import interfaces, resolve
from trainer.ops.supervise.hosts import Host

_LOGIN_PART, _FACTS_PART = 0.45, 0.75
"""Shares of the time after which a login, and the facts of a host, are not waited for any more."""
_LISTEN_S, _CONNECT_S, _PROBE_S = 10.0, 3.0, 12.0
"""For a second login; for a connection; and more than all timeouts of a program that tries connections together."""
_BANDWIDTH_S, _LEFT_S = 0.3, 3.0
"""For each bandwidth; and how much time is left when no other bandwidth is measured."""
_ALL_REDUCE_S = 30.0

K = TypeVar("K")


def look(hosts: Sequence[Host], script: str, timeout_s: float, *, with_gpus: bool) -> Facts:
    """Return what could be found out within the time that is given; the script is empty where none is compared.

    Raises:
        ConfigError: ssh is not installed.
    """
    deadline, here = time.monotonic() + timeout_s, socket.gethostname()
    elsewhere = next((host.name for host in hosts if not host.is_here), None)
    if elsewhere is not None and shutil.which("ssh") is None:
        raise ConfigError(f"-H names {elsewhere}, and there is no ssh to reach it; install openssh-client")
    found = tuple(HostFacts(host=host, peer=here if host.is_here else host.name) for host in hosts)
    facts = Facts(here=here, hosts=found, own_addresses=dict(interfaces()))
    job = {"python": sys.executable, "folder": str(Path.cwd()), "script": script, "with_gpus": with_gpus}
    job |= {"python_path": os.environ.get("PYTHONPATH", ""), "names": [host.peer for host in found]}
    _at_once(facts, lambda host: _look_at(host, job, timeout_s), found)
    if len(facts.answering) > 1:
        _connect_pairs(facts, deadline)
    return facts


def _at_once(facts: Facts, function: Callable[[K], None], keys: Iterable[K]) -> None:
    """Call a function that asks hosts for all keys at the same time, and note in the facts where it fails."""

    def call(key: K) -> None:
        try:
            function(key)
        except CallError as error:
            facts.incomplete.append(str(error))

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(call, keys))


def _look_at(host: HostFacts, job: dict[str, Any], timeout_s: float) -> None:
    """Log in to a host and read what is there."""
    before, began = time.time(), time.monotonic()
    arguments = job | {"host": host.host.name, "slots": host.host.slots, "is_here": host.host.is_here}
    with Call(host.host, "host", arguments) as call:
        has_started = call.has_started(_LOGIN_PART * timeout_s)
        host.login_s = time.monotonic() - began
        try:
            answer = call.answer(max(0.0, _FACTS_PART * timeout_s - host.login_s) if has_started else 0.0)
        except CallError:
            if has_started and call.why() == NO_ANSWER:
                raise
            host.login_error = f"{call.errors()}\n{call.why()}".strip()
            host.settings = _ssh_settings(host.host.name)
            host.seen_here = Way(**resolve(host.host.name, dict(interfaces())))
            return
    host.seconds_ahead = answer["time"] - min(max(answer["time"], before), time.time())
    host.printed, host.answer = call.printed, answer
    if answer["failed"]:
        raise CallError(f"host {host}: {'; '.join(answer['failed'])}")


def _ssh_settings(name: str) -> dict[str, str]:
    """Return what `ssh -G` prints for a host, the first value of each setting; empty where it does not say."""
    try:
        done = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    return {name: value for name, _, value in reversed(lines)}


def _connect_pairs(facts: Facts, deadline: float) -> None:
    """Let each host listen at its addresses on the ways to the others, and connect to those of the others."""
    hosts, token = facts.answering, secrets.token_hex(16)

    listening: dict[HostFacts, tuple[Call, dict[str, list[int]]]] = {}

    def start(host: HostFacts) -> None:
        own = {host.way(other).source for other in hosts if other is not host} - {""}
        call = at_end.enter_context(Call(host.host, "exchange", {"addresses": sorted(own), "token": token}))
        listening[host] = call, call.answer(_LISTEN_S)

    def connect(host: HostFacts) -> None:
        number, left = hosts.index(host), deadline - time.monotonic() - _LEFT_S
        targets = {
            str(other): (address, listening[other][1][address])
            for other in (*hosts[number + 1 :], *hosts[:number])
            if other in listening and (address := other.way(host).source)
        }
        call = listening[host][0]
        call.tell({"targets": targets, "wait_s": _CONNECT_S, "bandwidth_s": _BANDWIDTH_S, "all_s": left})
        for other, pair in call.answer(_PROBE_S + max(0.0, left)).items():
            facts.pairs[str(host), other] = pair

    with ExitStack() as at_end:
        _at_once(facts, start, hosts)
        _at_once(facts, connect, tuple(listening))


def try_all_reduces(facts: Facts) -> None:
    """Add all-reduces on each host's GPUs, then between neighbours, to the facts. Each round has a host once."""
    hosts = [host for host in facts.answering if host.answer["gpus"]]
    within = [(host,) * min(2, len(host.answer["gpus"])) for host in hosts]
    between = [ends for ends in pairwise(hosts) if ends[0].way(ends[1]).source]
    for ranks in (within, between[::2], between[1::2]):
        if not any("error" in tried for tried in facts.all_reduces):
            _at_once(facts, lambda hosts: facts.all_reduces.append(all_reduce(hosts)), ranks)


def all_reduce(ranks: tuple[HostFacts, ...], backend: str = "nccl", limit_s: float = _ALL_REDUCE_S) -> dict[str, Any]:
    """Return what a small all-reduce has measured, or its "error" and its "output", and the names of the "hosts".

    It has one or two ranks, on these hosts. They are killed at the time limit.
    """
    until, names = time.monotonic() + limit_s, list(dict.fromkeys(map(str, ranks)))
    way = ranks[0].way(ranks[-1]) if len(names) > 1 else Way(source="127.0.0.1")
    shared = {"backend": backend, "size": len(ranks), "limit_s": limit_s, "address": way.source}

    def measured(rank: int) -> dict[str, Any]:
        if rank == 0:
            port = calls[0].answer(until - time.monotonic())  # of the store
            for call in calls[1:]:
                call.tell(port)
        answer: dict[str, Any] = calls[rank].answer(until - time.monotonic())
        return answer

    with ExitStack() as at_end, ThreadPoolExecutor(len(ranks)) as pool:
        calls = []
        for rank, host in enumerate(ranks):
            interface = host.way(ranks[1 - rank]).interface if len(names) > 1 else ""
            asked = shared | {"rank": rank, "gpu": rank if len(names) == 1 else 0, "interface": interface}
            calls.append(at_end.enter_context(Call(host.host, "all_reduce", asked)))
        futures = [pool.submit(measured, rank) for rank in range(len(ranks))]
        wait(futures, return_when=FIRST_EXCEPTION)
        failed = [call for call, future in zip(calls, futures, strict=True) if future.done() and future.exception()]
        if not failed:
            return {"hosts": names, **futures[0].result()}
        error = failed[0].why()
        wait(futures, timeout=min(2.0, max(0.0, until - time.monotonic())))  # the other rank may say more
        output = "\n".join(call.errors() for call in [*failed, *calls]).strip()
        for call in calls:
            call.kill()
    return {"hosts": names, "error": error, "output": output}

"""Collect the facts: a call to each host that reads what is there, and one that tries the network between the hosts."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from trainer.errors import ConfigError
from trainer.ops.doctor.agent import addresses
from trainer.ops.doctor.facts import AllReduce, Facts, HostFacts, Login, Name, Pair
from trainer.ops.doctor.program import Program, ProgramError, source_of
from trainer.ops.ssh import DEBUG, NO_ANSWER, ssh_settings
from trainer.ops.supervise.hosts import Host

_LOGIN_PART, _FACTS_PART = 0.45, 0.75
"""Shares of the time after which a login, and the facts of a host, are not waited for any more."""
_LISTEN_S, _CONNECT_S, _PROBE_S = 10.0, 3.0, 12.0
"""For a second login; for a connection; and more than all timeouts of a program that tries connections together."""
_BANDWIDTH_S, _LEFT_S = 0.3, 3.0
"""For each bandwidth; and how much time is left when no other bandwidth is measured."""
_ALL_REDUCES_S, _ALL_REDUCE_LIMIT_S, _ALL_REDUCE_LEAST_S = 60.0, 30.0, 10.0
"""For all of them together, after all else; for each; and without this much time left, another one is not begun."""
_MOST_THREADS = 64

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
    elsewhere = next((host.name for host in hosts if not host.is_here), None)
    if elsewhere is not None and shutil.which("ssh") is None:
        raise ConfigError(f"-H names {elsewhere}, and there is no ssh to reach it; install openssh-client")
    here, folder = socket.gethostname(), str(Path.cwd())
    found = tuple(
        HostFacts(name=host.name, slots=host.slots, is_here=host.is_here, peer=here if host.is_here else host.name)
        for host in hosts
    )
    job = {"folder": folder, "script": script, "python_path": os.environ.get("PYTHONPATH", "")}
    arguments: dict[str, Any] = {"machine": {"folder": folder}, "software": job}
    arguments |= {"addresses": {"names": [host.peer for host in found]}} | ({"gpus": {}} if with_gpus else {})
    facts = Facts(hosts=found, here=here, script=script)
    with ThreadPoolExecutor(1) as pool:  # a name server that is dead takes its time beside the logins
        seeing = pool.submit(addresses.look, [host.name for host in found])
        _at_once(facts, lambda host: _look_at(host, arguments, timeout_s), found)
    facts.own_addresses = frozenset(seeing.result()["own"])
    for host in found:
        host.seen_here = Name(**seeing.result()["names"][host.name])
        host.names = {other.name: host.names[other.peer] for other in found if other.peer in host.names} | (
            {"": host.names[""]} if host.names else {}
        )
    if len(facts.answering) > 1:
        _connect_pairs(facts, deadline)
    if with_gpus:
        try_all_reduces(facts)
    return facts


def _at_once(facts: Facts, call: Callable[[K], T], keys: Iterable[K]) -> dict[K, T]:
    """Call a function that asks hosts for all keys at the same time; return its values where they have answered.

    The errors of the others are noted among the facts.
    """
    with ThreadPoolExecutor(_MOST_THREADS) as pool:
        futures = {key: pool.submit(call, key) for key in keys}
    answers = {}
    for key, future in futures.items():
        try:
            answers[key] = future.result()
        except ProgramError as error:
            facts.incomplete += (str(error),)
    return answers


def _look_at(host: HostFacts, arguments: dict[str, Any], timeout_s: float) -> None:
    """Log in to a host and read what is there."""
    sent = {name: (source_of(name), values) for name, values in arguments.items()}
    before, began = time.time(), time.monotonic()
    with Program(_host(host), source_of("facts"), sent, DEBUG) as program:
        has_started = program.has_started(_LOGIN_PART * timeout_s)
        seconds = time.monotonic() - began
        try:
            answer = program.answer(max(0.0, _FACTS_PART * timeout_s - seconds) if has_started else 0.0)
        except ProgramError:
            if has_started and program.why() == NO_ANSWER:
                raise
            host.login = _failed_login(program, seconds, ssh_settings(host.name))
            return
        after = time.time()
    host.login = Login(seconds, printed=program.printed)
    host.seconds_ahead = answer["time"] - min(max(answer["time"], before), after)
    host.machine, host.software = answer.get("machine", {}), answer.get("software", {})
    host.gpus = answer.get("gpus")
    if seen := answer.get("addresses"):
        host.interfaces, host.own = seen["interfaces"], seen["own"]
        host.names = {name: Name(**entry) for name, entry in seen["names"].items()}
    if answer["failed"]:
        raise ProgramError(f"host {host}: {'; '.join(answer['failed'])}")


def _host(host: HostFacts) -> Host:
    return Host(host.name, host.slots)


def _failed_login(program: Program, seconds: float, settings: dict[str, str]) -> Login:
    said, why = program.errors(), program.why()
    error = said if said.endswith(why) else f"{said}\n{why}".strip()
    return Login(seconds, error, program.printed, program.is_in_key_exchange, settings)


def _connect_pairs(facts: Facts, deadline: float) -> None:
    """Let each host listen at its addresses on the ways to the others, and connect to those of the others."""
    hosts, token, source = facts.answering, secrets.token_hex(16), source_of("network")

    def start(host: HostFacts) -> tuple[Program, dict[str, list[int]]]:
        own = {host.way(other).reachable_source for other in hosts if other is not host} - {""}
        program = Program(_host(host), source, {"addresses": sorted(own), "token": token})
        at_end.callback(program.close)
        return program, program.answer(_LISTEN_S)

    def connect(host: HostFacts) -> dict[str, Any]:
        number = hosts.index(host)
        targets = {
            other.name: (address, listening[other][1][address])
            for other in (*hosts[number + 1 :], *hosts[:number])
            if other in listening and (address := other.way(host).reachable_source)
        }
        left = deadline - time.monotonic() - _LEFT_S
        program = listening[host][0]
        program.tell({"targets": targets, "wait_s": _CONNECT_S, "bandwidth_s": _BANDWIDTH_S, "all_s": left})
        answer: dict[str, Any] = program.answer(_PROBE_S + max(0.0, left))
        return answer

    with ExitStack() as at_end:
        listening = _at_once(facts, start, hosts)
        answers = _at_once(facts, connect, listening)
    facts.pairs = {
        (host.name, other): Pair(**pair) for host, answer in answers.items() for other, pair in answer.items()
    }


def try_all_reduces(facts: Facts) -> None:
    """Add all-reduces between GPUs of one host, on all hosts at once, then between neighbours, to the facts."""
    until = time.monotonic() + _ALL_REDUCES_S
    gpus = {host: len((host.gpus or "").splitlines()) for host in facts.answering if host.versions.get("CUDA")}

    def within(host: HostFacts) -> AllReduce:
        return all_reduce((host, host), "nccl", limit_s=_ALL_REDUCE_LIMIT_S)

    facts.all_reduces = tuple(_at_once(facts, within, [host for host, count in gpus.items() if count >= 2]).values())
    for host, other in pairwise(host for host, count in gpus.items() if count):
        left = min(_ALL_REDUCE_LIMIT_S, until - time.monotonic())
        names = host.name, other.name
        pairs = [facts.pairs[ends] for ends in (names, names[::-1]) if ends in facts.pairs]
        address = host.way(other).reachable_source
        if address and left >= _ALL_REDUCE_LEAST_S and not any(pair.error or pair.loses_large for pair in pairs):
            facts.all_reduces += (all_reduce((host, other), "nccl", limit_s=left, address=address),)


def all_reduce(
    hosts: tuple[HostFacts, HostFacts], backend: str, *, limit_s: float, address: str = "127.0.0.1"
) -> AllReduce:
    """Return an all-reduce of two ranks.

    Args:
        hosts: of rank 0 and rank 1; may be the same.
        backend: "nccl", or "gloo" between CPUs.
        limit_s: seconds after which the ranks are killed.
        address: where rank 0 waits for rank 1.
    """
    source = source_of("all_reduce")
    shared = {"backend": backend, "size": 2, "limit_s": limit_s, "address": address}
    until = time.monotonic() + limit_s
    names, is_within = tuple(dict.fromkeys(host.name for host in hosts)), hosts[0] is hosts[1]
    with ExitStack() as at_end, ThreadPoolExecutor(2) as pool:
        programs = []
        for rank, host in enumerate(hosts):
            interface = "" if is_within else host.way(hosts[1 - rank]).interface
            asked = {"rank": rank, "gpu": rank if is_within else 0, "interface": interface, **shared}
            programs.append(at_end.enter_context(Program(_host(host), source, asked)))
        futures = [pool.submit(_measured, programs, rank, until) for rank in range(2)]
        wait(futures, return_when=FIRST_EXCEPTION)
        failed = next((future for future in futures if future.done() and future.exception()), None)
        if failed is None:
            return AllReduce(hosts=names, result=futures[0].result())
        error = programs[futures.index(failed)].why()
        wait(futures, timeout=min(2.0, max(0.0, until - time.monotonic())))  # the other rank may say more
        output = "\n".join(program.errors() for program in programs)
        for program in programs:
            program.kill()
    return AllReduce(hosts=names, output=output, error=error)


def _measured(programs: list[Program], rank: int, until: float) -> Any:
    if rank == 0:
        programs[1].tell(programs[0].answer(until - time.monotonic()))  # the port of the store
    return programs[rank].answer(until - time.monotonic())

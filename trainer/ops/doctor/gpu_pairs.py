"""Small all-reduces over NCCL: between two GPUs of each host that has two, and between two hosts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer.ops.doctor.connection import AgentError, Connection
from trainer.ops.doctor.facts import AllReduce, Facts
from trainer.ops.doctor.options import ALL_REDUCE_S
from trainer.ops.doctor.pairs import address_for
from trainer.ops.doctor.progress import Progress

SOURCE = Path(__file__).with_name("all_reduce.py")
_LIMIT_S, _LEAST_S, _ANSWER_S, _PORT_S = 30.0, 10.0, 5.0, 5.0


def try_all_reduces(facts: Facts, connections: Mapping[str, Connection], progress: Progress) -> Facts:
    """Return the facts with all-reduces between GPUs of one host, on all hosts at once, then between neighbours."""
    until = time.monotonic() + ALL_REDUCE_S
    gpus = {name: len(facts.gpus.get(name, {}).get("query", "").splitlines()) for name in connections}
    ready = {name: count for name, count in gpus.items() if _has_cuda(facts, name)}
    found, failures = list(facts.all_reduces), list(facts.incomplete)

    def within(name: str) -> AllReduce | str:
        return run({name: connections[name]}, "nccl", limit_s=_LIMIT_S)

    alone = [name for name, count in ready.items() if count >= 2]
    if alone:
        progress.show("summing between two GPUs of a host")
        with ThreadPoolExecutor(max_workers=len(alone)) as pool:
            _sort(pool.map(within, alone), found, failures)
    for first, second in pairwise(name for name, count in ready.items() if count):
        left = min(_LIMIT_S, until - time.monotonic() - _ANSWER_S)
        address = address_for(facts, first, second)
        if not address or left < _LEAST_S or not _is_reached(facts, first, second):
            continue
        progress.show(f"summing between GPUs of {first} and {second}")
        both = {name: connections[name] for name in (first, second)}
        interfaces = _interface(facts, first, second), _interface(facts, second, first)
        _sort([run(both, "nccl", address=address, interfaces=interfaces, limit_s=left)], found, failures)
    return replace(facts, all_reduces=tuple(found), incomplete=tuple(failures))


def _has_cuda(facts: Facts, name: str) -> bool:
    return bool(facts.software.get(name, {}).get("versions", {}).get("CUDA"))


def _is_reached(facts: Facts, first: str, second: str) -> bool:
    """Return whether bytes get through between two hosts; where they do not, that is the finding."""
    pairs = [facts.pairs[ends] for ends in ((first, second), (second, first)) if ends in facts.pairs]
    return not any(pair.error or pair.large for pair in pairs)


def _interface(facts: Facts, here: str, there: str) -> str:
    seen = facts.names.get(here, {}).get(there)
    return seen.interface if seen is not None else ""


def _sort(tried: Iterable[AllReduce | str], found: list[AllReduce], failures: list[str]) -> None:
    for one in tried:
        if isinstance(one, AllReduce):
            found.append(one)
        else:
            failures.append(one)


def run(
    connections: Mapping[str, Connection], backend: str, *, limit_s: float, address: str = "",
    interfaces: tuple[str, str] = ("", ""),
) -> AllReduce | str:  # fmt: skip
    """Return an all-reduce of two ranks, or why an agent could not try it.

    Args:
        connections: to one host, which runs both ranks, or to two.
        backend: "nccl", or "gloo" between CPUs.
        address: where the first of two hosts waits for the second.
        interfaces: of the two hosts, on the way to each other.
    """
    shared = {"source": SOURCE.read_text(), "backend": backend, "size": 2, "limit_s": limit_s}
    try:
        if len(connections) == 1:
            asked = [{"ranks": [0, 1], "store": "", "interface": ""}]
        else:
            first = next(iter(connections.values()))
            store = f"tcp://{address}:{first.call('free_port', _PORT_S, address=address)}"
            asked = [{"ranks": [rank], "store": store, "interface": interfaces[rank]} for rank in (0, 1)]

        def ask(part: tuple[Connection, dict[str, Any]]) -> Any:
            connection, arguments = part
            return connection.call("all_reduce", limit_s + _ANSWER_S, **shared, **arguments)

        with ThreadPoolExecutor(max_workers=len(asked)) as pool:
            answers = list(pool.map(ask, zip(connections.values(), asked, strict=True)))
    except AgentError as error:
        return str(error)
    return AllReduce(
        hosts=tuple(connections), outputs=tuple(text for answer in answers for text in answer["outputs"]),
        was_killed=any(answer["killed"] for answer in answers), limit_s=limit_s,
    )  # fmt: skip

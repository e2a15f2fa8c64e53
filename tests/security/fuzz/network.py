"""Targets that come from a network: what strangers send to a job, and what a job's processes send each other."""

from __future__ import annotations

import hmac
import importlib
import json
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
from horovod.runner.http.http_server import Server, Store, _Handler

from examples.strategies.parameter_server import wire
from examples.strategies.parameter_server.identity import seal, unseal
from examples.strategies.parameter_server.wire import decode, encode
from tests.security.fuzz.connections import Connection
from tests.security.fuzz.target import Target
from trainer.ops.doctor.agent import network
from trainer.ops.doctor.program import MARK, Program, ProgramError
from trainer.ops.supervise import remote
from trainer.ops.supervise.hosts import Host
from trainer.watch.heartbeat import SIZE, Heartbeat, Record, State
from trainer.watch.job_folder import HANG, JobVerdict, parse_verdict

_KEY = "0123456789abcdef" * 2
_TOKEN = "ab" * 32


def _seal(data: bytes) -> None:
    opened = unseal(_TOKEN, data, "object", 1)
    assert opened is None or seal(_TOKEN, opened, "object", 1) == data


def _server() -> Any:
    """Import the server's script, which finds the modules in its own folder."""
    sys.path.insert(0, str(Path(wire.__file__).parent))
    try:
        return importlib.import_module("server")
    finally:
        del sys.path[0]


def _add_up(data: bytes) -> None:
    add_up = _server().add_up
    for messages in ((data, data), (encode("float32", bytes(16)), data)):
        kind, _ = decode(add_up(messages))
        assert kind == "bfloat16" or np.dtype(kind).kind in "biufc"


def _chunks() -> list[bytes]:
    kinds = ("float32", "float64", "float16", "int64", "uint8", "bool")
    return [encode("bfloat16", bytes(8)), *(encode(kind, np.ones(4, kind).tobytes()) for kind in kinds)]


class _Rendezvous(Server):
    """The server without a socket that listens."""

    def __init__(self) -> None:
        self.store, self.key, self.server_address = Store(), _KEY, ("127.0.0.1", 1)
        self._strangers, self._ranks, self._lock = {}, set(), threading.Lock()

    def take(self, data: bytes) -> bytes:
        connection: Any = Connection(data)
        self._strangers[connection] = None
        self.store.put("scope", "key", b"the value")
        _Handler(connection, ("127.0.0.1", 2), self)
        return bytes(connection.sent)


def _ask_as_stranger(data: bytes) -> None:
    if _KEY.encode() in data:
        return
    server = _Rendezvous()
    answer = server.take(data)
    assert b" 200 " not in answer, "a stranger was answered"
    assert server.store.names() == {"scope/key"}, "a stranger has changed the store"


def _ask_as_rank(data: bytes) -> None:
    _Rendezvous().take(data.replace(b"KEY", _KEY.encode()))


def _requests() -> list[bytes]:
    head = b" HTTP/1.1\r\nHost: a\r\nContent-Length: "
    gets = [method + b" /KEY/scope/key" + head + b"0\r\n\r\n" for method in (b"GET", b"DELETE", b"POST")]
    return [*gets, b"PUT /KEY/scope/name" + head + b"5\r\n\r\nvalue", gets[0] + gets[1]]


def _exchange(data: bytes) -> None:
    """Connect to a program of `trainer doctor` that listens: the first byte says whether the proof is right."""
    is_rank, rest = data[:1] == b"\1", data[1:]
    challenge = bytes(32)
    proof = hmac.digest(_TOKEN.encode(), challenge, "sha256") if is_rank else b""
    connection = Connection(proof + rest)
    with mock.patch("os.urandom", return_value=challenge), suppress(OSError):
        network._serve(cast("Any", connection), _TOKEN.encode())
    assert is_rank or len(connection.sent) == 32, "a stranger got more than a challenge"


def _asked(sent: int, wanted: int) -> bytes:
    return b"\1" + network._REQUEST.pack(sent, wanted) + bytes(sent)


class _Printed(Program):
    """A program that has ended, and has printed these bytes."""

    def __init__(self, data: bytes) -> None:
        self.host, self.printed = Host("a", 1), ""
        *self._lines, _ = data.split(b"\n")

    def line(self, timeout_s: float) -> bytes | None:
        return self._lines.pop(0) if self._lines else None

    def why(self) -> str:
        return "it has ended"


def _answer_doctor(data: bytes) -> None:
    """Answer as a host's login shell and a program of the doctor's do, to two questions."""
    asked = _Printed(data)
    if asked.has_started(1.0):
        with suppress(ProgramError):
            asked.answer(1.0)
            asked.answer(1.0)


def _answers() -> list[bytes]:
    start = b"Welcome\n" + MARK.encode() + b"\n"
    lines = [json.dumps({"answer": value}).encode() + b"\n" for value in (1.5, {"a": [1, "b"]})]
    return [start + b"".join(lines), start + lines[0], start]


def _heartbeat(data: bytes) -> None:
    """Read a record's every field, as those do who read it."""
    heartbeat = Heartbeat.from_bytes(data)
    if heartbeat is not None:
        assert heartbeat.pid > 0
        assert isinstance(heartbeat.has_ended, bool)
        for name in ("what", "last", "phase", "error", "message", "folder", "pending"):
            getattr(heartbeat, name).encode()


def _heartbeats() -> list[bytes]:
    busy = Record(rank=1, state=State.WAITING, what=b"gradients", steps=9, phase=b"training")
    busy.head, busy.message = b"trainer-heartbeat 4711\n", ("é" * 256).encode()
    return [bytes(busy), bytes(busy)[: SIZE - 1]]


def _verdict(data: bytes) -> None:
    verdict = parse_verdict(data)
    assert verdict is None or (isinstance(verdict.text, str) and all(isinstance(n, int) for n in verdict.culprits))


def _verdicts() -> list[bytes]:
    return [json.dumps({"kind": HANG, "text": "no progress", "culprits": [0, 3]}).encode() + b"\n"]


class _Finished:
    """A process that has ended in good order."""

    returncode = 0

    def __init__(self, output: bytes) -> None:
        self._output = output

    def communicate(self, timeout: float) -> tuple[bytes, bytes]:
        return self._output, b""


def _hear_host(data: bytes) -> None:
    answer = remote._read(Host("a", 1), cast("Any", _Finished(data)), 0.0)
    assert answer.verdict is None or isinstance(answer.verdict, JobVerdict)
    assert all(rank.pid > 0 for rank in answer.ranks)


def _heard() -> Sequence[bytes]:
    head, records = b"trainer-host 12 13\n", _heartbeats()[0]
    return [head, head + records + _verdicts()[0], head + records * 2]


TARGETS = (
    Target("sealed object", _seal, lambda: [seal(_TOKEN, b"object", "object", 1)]),
    Target("parameter server's chunk", _add_up, _chunks, (ValueError,)),
    Target("rendezvous, stranger", _ask_as_stranger, _requests, (OSError,)),
    Target("rendezvous, rank", _ask_as_rank, _requests, (OSError,)),
    Target("doctor's exchange", _exchange, lambda: [_asked(0, 1), _asked(100, 0), _asked(0, 100) + _asked(0, 1)[1:]]),
    Target("doctor's answers", _answer_doctor, _answers),
    Target("heartbeat", _heartbeat, _heartbeats),
    Target("verdict.json", _verdict, _verdicts),
    Target("a host's answer", _hear_host, _heard),
)
"""Those of this module."""

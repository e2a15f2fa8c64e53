"""Targets that come from a network: what strangers send to a job, and what a job's processes send each other."""

from __future__ import annotations

import asyncio
import hmac
import importlib
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np

from examples.strategies.parameter_server import wire
from examples.strategies.parameter_server.wire import decode, encode
from tests.security.fuzz.target import Target
from trainer.ops.doctor.call import MARK, Call, CallError
from trainer.ops.doctor.remote import exchange
from trainer.ops.supervise import remote
from trainer.ops.supervise.hosts import Host
from trainer.ops.verdict import HANG, JobVerdict, parse_verdict
from trainer.watch.heartbeat import SIZE, Heartbeat, Record, State

_TOKEN = "ab" * 32


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


class _Writer:
    """The way to a client."""

    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data

    async def drain(self) -> None:
        """Wait for nobody."""


def _exchange(data: bytes) -> None:
    """Connect to a program of `trainer doctor` that listens: the first byte says whether the proof is right."""
    is_rank, rest = data[:1] == b"\1", data[1:]
    challenge, writer = bytes(32), _Writer()
    proof = hmac.digest(_TOKEN.encode(), challenge, "sha256") if is_rank else b""

    async def serve() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(proof + rest)
        reader.feed_eof()
        await exchange.serve(reader, cast("Any", writer), _TOKEN)

    with mock.patch("os.urandom", return_value=challenge), suppress(EOFError):
        asyncio.run(serve())
    assert is_rank or len(writer.sent) == 32, "a stranger got more than a challenge"


def _asked(*sizes: int) -> bytes:
    return b"\1" + b"".join(size.to_bytes(8, "big") for size in sizes)


class _Printed(Call):
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
        with suppress(CallError):
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


def _hear_host(data: bytes) -> None:
    answer = remote.parse_answer("a", data)
    assert answer.verdict is None or isinstance(answer.verdict, JobVerdict)
    assert all(rank.pid > 0 for rank in answer.ranks)


def _heard() -> Sequence[bytes]:
    head, record = b"trainer-host 12 13\n", b"+" + _heartbeats()[0]
    return [head, head + _verdicts()[0].rstrip() + b"\n" + record, head + b"\n" + record * 2]


TARGETS = (
    Target("parameter server's chunk", _add_up, _chunks, (ValueError,)),
    Target("doctor's exchange", _exchange, lambda: [_asked(1), _asked(0), _asked(100, 1)]),
    Target("doctor's answers", _answer_doctor, _answers),
    Target("heartbeat", _heartbeat, _heartbeats),
    Target("verdict.json", _verdict, _verdicts),
    Target("a host's answer", _hear_host, _heard),
)
"""Those of this module."""

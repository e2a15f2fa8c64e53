"""What the programs of `trainer doctor` exchange, and with whom they do not."""

from __future__ import annotations

import asyncio
import hmac
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from trainer.ops.doctor import call as calls
from trainer.ops.doctor.call import Call, source_of
from trainer.ops.doctor.remote import exchange
from trainer.ops.supervise.hosts import Host

TOKEN = "0" * 32
LOCAL = "127.0.0.1"
ASK = (1).to_bytes(8, "big")


@pytest.fixture
def listening() -> Iterator[Call]:
    """Start a program that listens."""
    with Call(Host("localhost", 1), "exchange", {"addresses": [LOCAL], "token": TOKEN}) as call:
        yield call


@pytest.fixture
def ports(listening: Call) -> list[int]:
    return list(map(int, listening.answer(20)[LOCAL]))


def tried(ports: list[int], token: str = TOKEN, wait_s: float = 5.0) -> dict[str, Any]:
    targets = {"b": (LOCAL, ports)}
    pair = asyncio.run(exchange.try_all(token, targets, wait_s=wait_s, bandwidth_s=0.1, all_s=5))["b"]
    assert isinstance(pair, dict)
    return pair


def test_bytes_come_from_ports_as_jobs_take_them(listening: Call, ports: list[int]) -> None:
    pair = tried(ports)
    assert pair["errors"] == {str(port): "" for port in ports}
    assert pair["bytes_per_s"] > 1e6
    assert ports[1] in exchange.CHOSEN_PORTS
    assert ports[2] in exchange.FIRST_PORTS
    listening.close()
    assert set(tried(ports)["errors"].values()) == {"connection refused"}, "it ends with its connection"


def test_errors_are_told_by_port(ports: list[int]) -> None:
    with socket.create_server((LOCAL, 0)) as silent:
        pair = tried([ports[0], silent.getsockname()[1]], wait_s=0.3)
    assert list(pair["errors"].values()) == ["", "timed out"]
    assert "bytes_per_s" not in pair


def test_who_has_no_token_gets_nothing(ports: list[int]) -> None:
    for port in ports:
        with socket.create_connection((LOCAL, port), timeout=5) as stranger:
            stranger.sendall(b"1" * exchange.PROOF_BYTES + ASK)
            challenge = receive(stranger, exchange.PROOF_BYTES)
            assert len(challenge) == exchange.PROOF_BYTES
            assert receive(stranger, 1) == b""
    assert set(tried(ports, "1" * 32)["errors"].values()) <= {"the connection was closed", "connection reset by peer"}


def test_a_proof_that_was_recorded_is_refused(ports: list[int]) -> None:
    proof = b""
    for expected in (b"\0", b""):
        with socket.create_connection((LOCAL, ports[0]), timeout=5) as connection:
            challenge = receive(connection, exchange.PROOF_BYTES)
            proof = proof or hmac.digest(TOKEN.encode(), challenge, "sha256")
            connection.sendall(proof + ASK)
            assert receive(connection, 1) == expected


def receive(connection: socket.socket, size: int) -> bytes:
    """Return what comes before the connection is closed, or reset because something was not read."""
    try:
        return connection.recv(size, socket.MSG_WAITALL)
    except ConnectionResetError:
        return b""


def test_a_proof_has_one_deadline_however_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of("exchange").replace("PROOF_S, _PROVEN_S = 32, 10.0", "PROOF_S, _PROVEN_S = 32, 0.3")
    monkeypatch.setattr(calls, "source_of", lambda _: source)
    with Call(Host("localhost", 1), "exchange", {"addresses": [LOCAL], "token": TOKEN}) as call:
        (port, *_), began = call.answer(20)[LOCAL], time.monotonic()
        with (
            socket.create_connection((LOCAL, port), timeout=5) as stranger,
            pytest.raises(OSError, match=r"Broken pipe|reset"),
        ):
            trickle(stranger)
    assert time.monotonic() - began < 2


def trickle(connection: socket.socket) -> None:
    for _ in range(exchange.PROOF_BYTES - 1):
        connection.sendall(b"x")
        time.sleep(0.1)


def test_strangers_that_say_nothing_keep_nobody_out(ports: list[int]) -> None:
    strangers = [socket.create_connection((LOCAL, ports[0]), timeout=5) for _ in range(200)]
    assert tried(ports[:1])["errors"] == {str(ports[0]): ""}
    for stranger in strangers:
        stranger.close()


def test_messages_that_are_larger_than_what_gets_through(ports: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener refuses a message that is too large."""
    monkeypatch.setattr(exchange, "LARGE_BYTES", exchange.MOST_BYTES + 1)
    pair = tried(ports)
    assert pair["large_error"] == "the connection was closed"
    assert "bytes_per_s" not in pair

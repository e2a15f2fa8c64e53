"""Strangers at an agent's port: slow ones and many keep nobody out, and do not end it."""

from __future__ import annotations

import resource
import socket
import time

import pytest

from trainer.ops.doctor.agent import network

HOST = "127.0.0.1"
TOKEN = "0" * network.TOKEN_BYTES


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(network, "_LISTEN_S", 5.0)
    return network.listen(HOST, TOKEN)[0]


def connect(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=5)


def has_ended(connection: socket.socket) -> bool:
    """Whether the other side has ended it; the challenge may come before that."""
    connection.settimeout(0.5)
    try:
        while connection.recv(64):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


def trickle(connection: socket.socket) -> None:
    """Send a proof, a byte now and then."""
    for _ in range(network._PROOF_BYTES - 1):
        connection.sendall(b"x")
        time.sleep(0.1)


def test_a_proof_has_one_deadline_however_it_comes(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_UNPROVEN_S", 0.3)
    began = time.monotonic()
    with connect(port) as stranger, pytest.raises(OSError, match=r"Broken pipe|reset"):
        trickle(stranger)
    assert time.monotonic() - began < 2


def test_the_newest_connection_ends_the_oldest_that_has_proven_nothing(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_MOST_UNPROVEN", 2)
    with network._connect(HOST, port, TOKEN, 5) as proven:
        network._ask(proven, *network._PING)
        with connect(port) as first, connect(port) as second, connect(port):
            assert has_ended(first)
            assert not has_ended(second)
            network._ask(proven, *network._PING)
            with network._connect(HOST, port, TOKEN, 5) as another:
                network._ask(another, *network._PING)


def test_who_was_ended_while_proving_itself_gets_no_answer(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_MOST_UNPROVEN", 0)
    with pytest.raises(OSError, match=r"closed|reset|Broken pipe"), network._connect(HOST, port, TOKEN, 5) as ended:
        network._ask(ended, *network._PING)


def test_listening_goes_on_when_there_are_file_descriptors_again(port: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as stranger:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            stranger.connect((HOST, port))
            time.sleep(0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert network.probe(HOST, [port], TOKEN, 3)["errors"] == {str(port): ""}

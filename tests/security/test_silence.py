"""How long a proven connection may take: as long as it likes, if it never pauses for long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from horovod.runner.http import http_client, proof
from horovod.runner.http.http_client import put_data_into_kvstore
from horovod.runner.util import listener

from tests.security.stores import HOST, KEY, Store, started

VALUE = bytes(40_000_000)
LIMIT_S = 1.5
"""Of silence. A busy machine may leave a process alone for half a second."""


@pytest.fixture
def store() -> Iterator[Store]:
    with started("function") as one:
        yield one


def test_an_answer_may_take_long_if_it_never_pauses(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put_data_into_kvstore(HOST, store.port, "scope", "large", VALUE, KEY)
    monkeypatch.setattr(listener, "PROVEN_SECONDS", LIMIT_S)
    with socket.create_connection((HOST, store.port), timeout=15) as connection:
        connection.sendall(store.head("GET", "/scope/large"))
        assert read_slowly(connection) > len(VALUE)


def test_a_reader_that_pauses_too_long_is_left(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put_data_into_kvstore(HOST, store.port, "scope", "large", VALUE, KEY)
    monkeypatch.setattr(listener, "PROVEN_SECONDS", LIMIT_S)
    with socket.create_connection((HOST, store.port), timeout=15) as connection:
        connection.sendall(store.head("GET", "/scope/large"))
        time.sleep(2 * LIMIT_S)
        assert read_slowly(connection) < len(VALUE)


def read_slowly(connection: socket.socket) -> int:
    """Read to the end, for longer than the limit; return the number of bytes."""
    received, began = 0, time.monotonic()
    try:
        while part := connection.recv(1_000_000):
            received += len(part)
            time.sleep(max(0.0, began + 2.5 * LIMIT_S * received / len(VALUE) - time.monotonic()))
    except ConnectionError:
        pass
    return received


def test_a_request_may_take_long_if_the_server_goes_on_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(http_client, "ATTEMPTS", 1)
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rb", buffering=0) as received:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += received.read(1) or b""
                left = int(head.lower().split(b"content-length: ")[1].split()[0])
                while left:
                    left -= len(received.read(min(left, 1_000_000)) or b"")
                    time.sleep(0.08)
                answer = proof.answer_mac(KEY, head.split(b"Horovod-Proof: ")[1].split()[3].decode(), 200, b"")
                connection.sendall(f"HTTP/1.0 200 OK\r\nHorovod-Proof: {answer}\r\n\r\n".encode())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        began = time.monotonic()
        put_data_into_kvstore(HOST, server.getsockname()[1], "scope", "large", VALUE, KEY)
        assert time.monotonic() - began > 2 * LIMIT_S
        thread.join(5)

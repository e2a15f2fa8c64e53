"""What a job's output says of requests: those of its own processes that fail, and nothing of strangers' requests."""

from __future__ import annotations

import logging
import socket

import pytest
from horovod.runner.common.util.network import BasicClient, BasicService
from horovod.runner.http.http_client import put_data_into_kvstore
from horovod.runner.http.http_server import RendezvousHandler, RendezvousServer
from horovod.runner.util import listener

from tests.security.stores import HOST, KEY, Store

NAME = "a service"


class Failing(RendezvousHandler):  # type: ignore[misc]
    """A handler with a mistake in it."""

    def _put_value(self, scope: str, key: str, value: bytes) -> None:
        raise KeyError("a mistake of ours")


def test_what_fails_in_serving_the_job_is_an_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    server = RendezvousServer(0, KEY)
    store_port = server.start(Failing, [HOST])
    server.init([])
    with pytest.raises(RuntimeError, match="Put data"):
        put_data_into_kvstore(HOST, store_port, "scope", "key", 7, KEY)
    server.stop()
    assert "a mistake of ours" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.ERROR}


def test_a_message_that_fails_is_an_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    service = BasicService(NAME, KEY, ["lo"])
    client = BasicClient(NAME, service.addresses(), KEY, 0, attempts=1)
    with pytest.raises(EOFError):
        client._send("what it does not know")
    service.shutdown()
    assert "NotImplementedError: what it does not know" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.ERROR}


def test_a_request_that_stops_is_an_error_in_the_log(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "PROVEN_SECONDS", 0.3)
    assert store.send_raw(store.head("PUT", "/scope/other", b"a body")) == b""
    assert [(record.levelno, "timed out" in record.getMessage()) for record in caplog.records] == [
        (logging.ERROR, True)
    ]


def test_nothing_that_a_stranger_sends_is_an_error_in_the_log(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    texts = [b"", b"GET", b"GET /scope/key HTTP/1.1\r\n\r\n", b"\xff" * 20000, b"PUT / HTTP/1.1\r\n\r\nx"]
    for data in texts:
        with socket.create_connection((HOST, store.port), timeout=5) as connection:
            connection.sendall(data)
    service = BasicService(NAME, KEY, ["lo"])
    for data in (b"", bytes(10), bytes(1000)):
        with socket.create_connection((HOST, service.get_port()), timeout=5) as connection:
            connection.sendall(data)
    assert store.serves()
    service.shutdown()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []

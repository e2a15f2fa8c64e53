"""What a job's output says of requests: those of its own ranks that fail, and nothing of strangers' requests."""

from __future__ import annotations

import logging
import socket

import pytest

from tests.security.stores import HOST, Store


def test_what_fails_in_serving_the_job_is_an_error_in_the_log(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(store.server.store, "put", fail)
    assert store.ask("PUT", "scope/key", b"7") == (0, b"")
    assert "a mistake of ours" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.ERROR}


def test_nothing_that_a_stranger_sends_is_an_error_in_the_log(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    texts = [b"", b"GET", b"GET /scope/key HTTP/1.1\r\n\r\n", b"\xff" * 20000, b"PUT / HTTP/1.1\r\n\r\nx"]
    for data in texts:
        with socket.create_connection((HOST, store.port), timeout=5) as connection:
            connection.sendall(data)
    assert store.serves()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []

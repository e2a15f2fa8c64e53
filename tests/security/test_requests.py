"""Requests that an intruder sends to the rendezvous: none reads or changes a value, ends it or holds it up."""

from __future__ import annotations

import hmac
import re
import socket
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.security.attacks import payload
from tests.security.stores import HOST, Store, started

METHODS = ("GET", "PUT", "DELETE", "HEAD", "POST", "OPTIONS", "TRACE", "NONSENSE")
PATHS = ("/scope/key", "/worker_addresses/localhost:0", "/runfunc/func", "/", "//scope/key", "/../../etc/passwd", "*")


@pytest.mark.parametrize("method", METHODS)
def test_without_the_key_nothing_is_read_or_changed(store: Store, tmp_path: Path, method: str) -> None:
    for path in (*PATHS, f"/{'0' * 32}/scope/key", f"/{store.server.key[:-1]}/scope/key", f"/x/{store.server.key}/x/y"):
        status, answer = store.send(method, path, payload(tmp_path / "marker"))
        assert status in (404, 0)
        assert answer == b""
    assert not (tmp_path / "marker").exists()
    assert store.names() == {"scope/key"}
    assert store.serves()


@pytest.mark.parametrize("method", METHODS[3:])
def test_with_the_key_there_are_three_methods(store: Store, method: str) -> None:
    assert store.ask(method, "scope/key", b"x") == (404, b"")
    assert store.serves()


@pytest.mark.parametrize("place", ["", "scope", "scope/key/more", "../scope/key"])
def test_with_the_key_there_are_scopes_and_names(store: Store, place: str) -> None:
    assert store.ask("PUT", place, b"x") == (404, b"")
    assert store.names() == {"scope/key"}


def test_a_rank_gets_the_bytes_that_another_has_put_there(store: Store, tmp_path: Path) -> None:
    value = bytes(range(256)) * 1000 + payload(tmp_path / "marker")
    assert store.ask("PUT", "global/0", value) == (200, b"")
    assert store.ask("GET", "global/0") == (200, value)
    assert not (tmp_path / "marker").exists()
    assert store.ask("GET", "global/1") == (404, b"")
    assert store.ask("DELETE", "global/0") == (200, b"")
    assert store.names() == {"scope/key"}


def test_every_job_has_another_key_of_128_bits() -> None:
    keys = set()
    for _ in range(3):
        with started() as store:
            keys.add(store.server.key)
    assert len(keys) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", key) for key in keys)


def test_the_key_is_compared_in_constant_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def note(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", note)
    store.send("GET", "/guess/scope/key")
    assert compared == [b"guess"]


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.one_of(st.binary(max_size=400), st.binary(max_size=40).map(lambda path: b"PUT /" + path + b" HTTP/1.1")))
def test_no_bytes_of_a_stranger_change_anything(store: Store, data: bytes) -> None:
    answer = store.send_raw(data + b"\r\n\r\n")
    assert b" 200 " not in answer
    assert b"the value" not in answer
    assert store.names() == {"scope/key"}


def test_a_request_may_end_anywhere(store: Store) -> None:
    whole = store.head("PUT", "scope/other", 20) + b"x" * 20
    for length in [*range(1, len(whole), 7), len(whole) - 1]:
        with socket.create_connection((HOST, store.port), timeout=15) as connection:
            connection.sendall(whole[:length])
    assert store.serves()
    assert store.names() == {"scope/key"}


def test_an_endless_head_is_not_read(store: Store) -> None:
    def send_without_end() -> None:
        with socket.create_connection((HOST, store.port), timeout=15) as connection:
            connection.sendall(b"GET /scope/key HTTP/1.1\r\n")
            for _ in range(1000):
                connection.sendall(b"a" * 1000)
                time.sleep(0.001)

    with pytest.raises(ConnectionError):
        send_without_end()
    assert store.serves()

"""Requests that an intruder sends to the launcher's store: none reads or changes a value, ends it or holds it up."""

from __future__ import annotations

import base64
import pickle
import socket
import threading
import time
from pathlib import Path

import pytest
from horovod.runner.common.util.secret import make_secret_key
from horovod.runner.http import proof
from horovod.runner.http.http_client import put_data_into_kvstore, read_data_from_kvstore

from tests.security.attacks import payload
from tests.security.stores import HOST, KEY, Store


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD", "POST", "OPTIONS", "TRACE", "NONSENSE"])
def test_without_proof_nothing_is_read_or_changed(store: Store, tmp_path: Path, method: str) -> None:
    for path in ("/scope/key", "/worker_addresses/localhost:0", "/runfunc/func", "/", "/../../etc/passwd", "*"):
        status, answer = store.send(method, path, payload(tmp_path / "marker"))
        assert status in (403, 0)
        assert answer == b""
    assert not (tmp_path / "marker").exists()
    assert store.names() == {"scope/key"}
    assert store.serves()


def test_a_request_is_accepted_once(store: Store) -> None:
    body = base64.b64encode(pickle.dumps("first"))
    header = store.proven("PUT", "/scope/other", body)
    assert store.send("PUT", "/scope/other", body, Horovod_Proof=header)[0] == 200
    put_data_into_kvstore(HOST, store.port, "scope", "other", "second", KEY)
    assert store.send("PUT", "/scope/other", body, Horovod_Proof=header)[0] == 403
    assert read_data_from_kvstore(HOST, store.port, "scope", "other", KEY) == "second"


def test_a_count_only_rises(store: Store) -> None:
    def request(count: int) -> int:
        client, empty = "ab" * 16, proof.hash_of(b"")
        mac = proof.request_mac(KEY, store.port, "GET", "/scope/key", 0, client, count, empty)
        return store.send("GET", "/scope/key", Horovod_Proof=f"{client} {count} {empty} {mac}")[0]

    assert [request(count) for count in (0, 1, 2, 2, 1, 7, 3)] == [403, 200, 200, 403, 403, 200, 403]


@pytest.mark.parametrize("part", ["method", "path", "body", "port", "length", "count", "client", "key"])
def test_a_proof_is_for_one_request_only(store: Store, part: str) -> None:
    body = b"x" * 10
    sent = {"method": "PUT", "path": "/scope/other", "body": body, "length": "10"}
    port = store.port + 1 if part == "port" else store.port
    key = make_secret_key() if part == "key" else KEY
    client, count, body_hash, mac = proof.sign(key, port, sent["method"], sent["path"], body)[0].split()
    count, client = ("2" if part == "count" else count), ("0" * 32 if part == "client" else client)
    if part == "body":
        body = b"y" * 10
    length = "5" if part == "length" else "10"
    method, path = "POST" if part == "method" else "PUT", "/scope/key" if part == "path" else "/scope/other"
    head = f"{method} {path} HTTP/1.1\r\nHorovod-Proof: {client} {count} {body_hash} {mac}\r\nContent-Length: {length}"
    answer = store.send_raw(f"{head}\r\n\r\n".encode() + body)
    assert answer.startswith(b"HTTP/1.0 400" if part == "body" else b"HTTP/1.0 403") or answer == b""
    assert store.names() == {"scope/key"}
    assert store.serves()


def test_an_answer_is_believed_with_a_proof_only(tmp_path: Path) -> None:
    """What stands in for the launcher, after it has gone, say, cannot hand over a function."""
    replies = [b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n%s\r\n" % (len(payload(tmp_path / "m")), extra)
               for extra in (b"", b"Horovod-Proof: \r\n", b"Horovod-Proof: " + b"0" * 64 + b"\r\n")]  # fmt: skip
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            for reply in replies:
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(reply + payload(tmp_path / "m"))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(RuntimeError, match="has no proof"):
            read_data_from_kvstore(HOST, server.getsockname()[1], "runfunc", "func", KEY)
        thread.join()
    assert not (tmp_path / "m").exists()


MALFORMED = [
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /scope/key\r\n\r\n",
    b"GET /scope/key HTTP/9.9\r\n\r\n",
    b"GET /scope/key HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET /scope/key HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n",
    b"PUT /scope/other HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"PUT /scope/other HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"PUT /scope/other HTTP/1.1\r\nContent-Length: 1000000000000\r\n\r\n",
    b"PUT /scope/other HTTP/1.1\r\nContent-Length: \xb2\r\n\r\n",
    b"PUT /scope/other HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
    b"PUT /scope/other HTTP/1.1\r\nHorovod-Proof: " + b"\xff" * 100 + b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    bytes(range(256)) * 8 + b"\r\n\r\n",
]


@pytest.mark.parametrize("data", MALFORMED)
def test_malformed_requests_are_refused_shortly(store: Store, data: bytes) -> None:
    with socket.create_connection((HOST, store.port), timeout=15) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        try:
            answer = connection.recv(65536)
        except ConnectionError:
            answer = b""
    assert len(answer) < 200
    assert b" 200 " not in answer
    assert b"the value" not in answer
    assert store.names() == {"scope/key"}
    assert store.serves()


def test_a_request_may_end_anywhere(store: Store) -> None:
    body = b"x" * 20
    header = store.proven("PUT", "/scope/other", body)
    whole = f"PUT /scope/other HTTP/1.1\r\nHorovod-Proof: {header}\r\nContent-Length: 20\r\n\r\n".encode() + body
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


def test_large_values_get_through(store: Store) -> None:
    value = bytes(30_000_000)
    put_data_into_kvstore(HOST, store.port, "scope", "large", value, KEY)
    assert read_data_from_kvstore(HOST, store.port, "scope", "large", KEY) == value


def test_a_worker_without_a_secret_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", "zz", "abcd"):
        if value is None:
            monkeypatch.delenv("HOROVOD_RENDEZVOUS_SECRET", raising=False)
        else:
            monkeypatch.setenv("HOROVOD_RENDEZVOUS_SECRET", value)
        with pytest.raises(RuntimeError, match="HOROVOD_RENDEZVOUS_SECRET"):
            read_data_from_kvstore(HOST, 9, "scope", "key")

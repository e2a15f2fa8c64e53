"""Requests that an intruder sends to the services of elastic ranks, which unpickle what the job's processes send."""

from __future__ import annotations

import hashlib
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from horovod.runner.common.util.network import BasicClient, BasicService, PingRequest, PingResponse, Wire
from horovod.runner.common.util.secret import compute_digest, make_secret_key
from horovod.runner.elastic import worker
from horovod.runner.util import listener
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.security.attacks import Payload

HOST = "127.0.0.1"
KEY = make_secret_key()
NAME = "a service"


@pytest.fixture(scope="module")
def service() -> Iterator[BasicService]:
    one = BasicService(NAME, KEY, ["lo"])
    yield one
    one.shutdown()


def answers(service: BasicService) -> bool:
    client = BasicClient(NAME, service.addresses(), KEY, 0, attempts=1, probe_timeout=5)
    return isinstance(client._send(PingRequest()), PingResponse)


def send(service: BasicService, data: bytes) -> bytes:
    """Send what does not depend on the server's challenge; return what came back after the challenge."""
    with socket.create_connection((HOST, service.get_port()), timeout=15) as connection:
        answer = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
        except ConnectionError:
            pass
        return answer[32:]


def message(key: bytes, body: bytes, challenges: bytes, size: int | None = None) -> bytes:
    head = struct.pack("<Q32s", len(body) if size is None else size, hashlib.sha256(body).digest())
    digest: bytes = compute_digest(key, challenges + head)
    return digest + head + body


def test_it_listens_on_its_interface_only(service: BasicService) -> None:
    assert service.addresses() == {"lo": [(HOST, service.get_port())]}
    assert service._server.socket.getsockname()[0] == HOST


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=400))
def test_no_bytes_of_a_stranger_are_answered(service: BasicService, data: bytes) -> None:
    assert send(service, data) == b""


@pytest.mark.parametrize("key", [b"", bytes(32), b"k" * 32])
def test_a_pickle_of_a_stranger_is_not_loaded(service: BasicService, tmp_path: Path, key: bytes) -> None:
    body = pickle.dumps(Payload(tmp_path / "marker"))
    with socket.create_connection((HOST, service.get_port()), timeout=15) as connection:
        both = connection.recv(32) + bytes(32)
        connection.sendall(bytes(32) + message(key, body, b"request" + both))
        assert connection.recv(100) == b""
    # The form that Horovod 0.28.1 reads.
    assert send(service, compute_digest(key, body) + struct.pack("i", len(body)) + body) == b""
    assert not (tmp_path / "marker").exists()
    assert answers(service)


def test_a_recorded_request_is_refused(service: BasicService) -> None:
    with socket.create_connection((HOST, service.get_port()), timeout=15) as connection:
        both = connection.recv(32) + bytes(32)
        recorded = bytes(32) + message(KEY, pickle.dumps(PingRequest()), b"request" + both)
        connection.sendall(recorded)
        assert connection.recv(65536)
    assert send(service, recorded) == b""


@pytest.mark.parametrize("reflected", [True, False])
def test_a_client_believes_neither_a_recorded_answer_nor_its_own_request(reflected: bool) -> None:
    recorded = message(KEY, pickle.dumps(PingResponse(NAME, HOST)), b"answer" + bytes(64))
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as received:
                connection.sendall(bytes(32))  # the challenge of the connection that was recorded
                received.read(32)
                request = received.read(len(message(KEY, pickle.dumps(PingRequest(), pickle.HIGHEST_PROTOCOL), b"")))
                connection.sendall(request if reflected else recorded)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with socket.create_connection(server.getsockname(), timeout=15) as connection:
            rfile, wfile = connection.makefile("rb"), connection.makefile("wb")
            wire = Wire(KEY)
            request, answer = wire.begin(rfile, wfile)
            wire.write(PingRequest(), wfile, request)
            with pytest.raises(Exception, match="digest did not match"):
                wire.read(rfile, answer)
        thread.join()


def test_an_answer_is_no_request(service: BasicService) -> None:
    with socket.create_connection((HOST, service.get_port()), timeout=15) as connection:
        both = connection.recv(32) + bytes(32)
        connection.sendall(bytes(32) + message(KEY, pickle.dumps(PingRequest()), b"answer" + both))
        assert connection.recv(100) == b""


@pytest.mark.parametrize("size", [2**63, 2**40, 2**31, 0])
def test_a_length_is_believed_with_a_proof_only(service: BasicService, size: int) -> None:
    with socket.create_connection((HOST, service.get_port()), timeout=15) as connection:
        both = connection.recv(32) + bytes(32)
        began = time.monotonic()
        connection.sendall(bytes(32) + message(b"another", b"", b"request" + both, size))
        assert connection.recv(100) == b""
        assert time.monotonic() - began < 2


def test_a_body_that_was_exchanged_is_not_loaded(service: BasicService, tmp_path: Path) -> None:
    other = pickle.dumps(Payload(tmp_path / "marker"))
    body = pickle.dumps(PingRequest()).ljust(len(other), b".")  # what follows a pickle's end is not read
    assert len(body) == len(other)
    with socket.create_connection((HOST, service.get_port()), timeout=15) as connection:
        both = connection.recv(32) + bytes(32)
        signed = message(KEY, body, b"request" + both)
        connection.sendall(bytes(32) + signed[: -len(body)] + other)
        assert connection.recv(100) == b""
    assert not (tmp_path / "marker").exists()


def test_slow_connections_keep_nobody_out(service: BasicService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "UNPROVEN_SECONDS", 1.0)
    many = [socket.create_connection((HOST, service.get_port()), timeout=15) for _ in range(200)]
    assert answers(service)
    time.sleep(1.5)
    for connection in many:
        received = b"-"
        while received:  # its challenge, then the end
            received = connection.recv(100)
        connection.close()
    assert answers(service)


def test_an_elastic_ranks_key_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    monkeypatch.setenv("HOROVOD_RENDEZVOUS_SECRET", KEY.hex())
    monkeypatch.setattr(worker, "put_data_into_kvstore", lambda *arguments: sent.append(arguments))
    manager = worker.WorkerNotificationManager()
    manager.init(HOST, 9, "lo", "localhost", 0)
    try:
        assert sent == [(HOST, 9, "worker_addresses", "localhost:0", manager._service.addresses())]
        assert set(manager._service.addresses()) == {"lo"}
        client = worker.WorkerNotificationClient(sent[0][4], KEY, 0)
        client.notify_hosts_updated(1.0, worker.HostUpdateResult.added)
    finally:
        manager._service.shutdown()


def test_so_many_bytes_are_read_and_no_more() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(bytes(listener.UNPROVEN_BYTES + 300))
        reader = listener.BoundedReader(ours)
        parts = bytearray(1000)
        received = 0
        while received < listener.UNPROVEN_BYTES:
            received += reader.readinto(parts)
        assert received == listener.UNPROVEN_BYTES
        with pytest.raises(TimeoutError):
            reader.readinto(parts)
        reader.expect(200)
        assert reader.readinto(parts) == 200
        with pytest.raises(TimeoutError):
            reader.readinto(parts)

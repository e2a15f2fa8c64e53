"""What the services listen with: it survives failures, keeps no process from ending, and ends those in excess."""

from __future__ import annotations

import resource
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.common.util.network import AckResponse, BasicClient, BasicService
from horovod.runner.http.http_client import put_data_into_kvstore, read_data_from_kvstore
from horovod.runner.http.http_server import RendezvousServer
from horovod.runner.util import listener

from tests.security.stores import HOST, KEY, Store, started

SECOND = "127.0.0.2"
NAME = "a service"
# A rank's process, which ends when it has said on which port it can be notified.
PROGRAM = """
import sys
from horovod.runner.common.util.network import BasicService
print(BasicService("a service", b"k" * 32, ["lo"]).get_port(), flush=True)
sys.stdin.readline()
"""


@contextmanager
def no_more_files() -> Iterator[None]:
    """Whatever needs a new file descriptor fails with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def on_two_addresses() -> Iterator[int]:
    server = RendezvousServer(0, KEY)
    port = server.start(addresses=[HOST, SECOND])
    server.init([])
    try:
        yield port
    finally:
        server.stop()


def serves(address: str, port: int) -> bool:
    put_data_into_kvstore(address, port, "scope", "key", 7, KEY)
    return bool(read_data_from_kvstore(address, port, "scope", "key", KEY) == 7)


@pytest.mark.parametrize("address", [HOST, SECOND])
def test_listening_goes_on_when_there_are_file_descriptors_again(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, tries = socket.socket.accept, []

    def count(self: socket.socket) -> tuple[socket.socket, Any]:
        tries.append(self)
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", count)
    with on_two_addresses() as port, socket.socket() as connection:
        connection.settimeout(5)
        with no_more_files():
            connection.connect((address, port))
            time.sleep(0.5)
        assert 0 < len(tries) < 20  # not all the time
        assert serves(address, port)


@pytest.mark.parametrize("address", [HOST, SECOND])
def test_listening_goes_on_when_no_thread_could_be_started(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    with on_two_addresses() as port:
        monkeypatch.setattr(socketserver.ThreadingMixIn, "process_request", fail)
        with socket.create_connection((address, port), timeout=5) as connection:
            assert connection.recv(1) == b""
        assert serves(address, port)


def test_strangers_do_not_keep_a_process_from_ending() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
        ExitStack() as stack,
    ):
        assert process.stdin
        assert process.stdout
        port = int(process.stdout.readline())
        for _ in range(20):
            held = stack.enter_context(socket.create_connection((HOST, port), timeout=5))
            assert len(held.recv(32)) == 32
        process.stdin.close()
        try:
            assert process.wait(listener.UNPROVEN_SECONDS / 2) == 0
        finally:
            process.kill()


class Slow(BasicService):  # type: ignore[misc]
    """A service that answers when it is told to."""

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Event(), threading.Event()
        super().__init__(NAME, KEY, ["lo"])

    def _handle(self, req: object, client_address: tuple[str, int]) -> Any:
        if req != "a question":
            return super()._handle(req, client_address)
        self.asked.set()
        self.may_answer.wait(20)
        return AckResponse()


def ask(service: Slow) -> Callable[[], list[object]]:
    """Ask in a thread, until the question is there; what is returned waits for the answers, and returns them."""
    client, answers = BasicClient(NAME, service.addresses(), KEY, 0, attempts=1), []

    def send() -> None:
        try:
            answers.append(client._send("a question"))
        except OSError as error:
            answers.append(error)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    assert service.asked.wait(5)

    def join() -> list[object]:
        thread.join(5)
        return answers

    return join


def test_closing_waits_for_the_answer_to_a_proven_request() -> None:
    service = Slow()
    answers = ask(service)
    threading.Timer(0.3, service.may_answer.set).start()
    service.shutdown()
    assert [type(answer) for answer in answers()] == [AckResponse]


def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Slow()
    monkeypatch.setattr(type(service._server), "closing_seconds", 0.3)
    answers = ask(service)
    began = time.monotonic()
    service.shutdown()
    assert 0.2 < time.monotonic() - began < 5
    service.may_answer.set()
    answers()


class Evicted:
    """Ends the next connection that proves itself just before it has, by so many others that it must go."""

    def __init__(self, server: Any) -> None:
        self.server, self.thread = server, threading.current_thread()
        self._prove, server.prove = server.prove, self._prove_late

    def _prove_late(self, request: socket.socket) -> object:
        self.thread, self.server.prove = threading.current_thread(), self._prove
        with ExitStack() as stack:
            for _ in range(listener.UNPROVEN_CONNECTIONS + 1):
                stack.enter_context(socket.create_connection(self.server.server_address, timeout=5))
            deadline = time.monotonic() + 5
            while request in self.server._unproven and time.monotonic() < deadline:
                time.sleep(0.01)
        return self._prove(request)

    def join(self) -> None:
        """Wait until the connection's thread has ended."""
        assert self.thread is not threading.current_thread()
        self.thread.join(5)
        assert not self.thread.is_alive()


def test_a_request_whose_connection_was_ended_changes_nothing(store: Store) -> None:
    evicted = Evicted(store.http)
    assert store.send_raw(store.head("PUT", "/scope/other", b"x") + b"x") == b""
    evicted.join()
    assert store.names() == {"scope/key"}
    assert store.serves()


def test_a_message_whose_connection_was_ended_is_not_handled() -> None:
    service = Slow()
    client = BasicClient(NAME, service.addresses(), KEY, 0, attempts=1)
    evicted = Evicted(service._server)
    with pytest.raises((OSError, EOFError)):
        client._send("a question")
    evicted.join()
    assert not service.asked.is_set()
    service.may_answer.set()
    assert isinstance(client._send("a question"), AckResponse)
    service.shutdown()


def test_a_rank_that_leaves_twice_counts_once() -> None:
    slots = [SlotInfo("localhost", rank, rank, 0, 2, 2, 1) for rank in range(2)]
    with started("rendezvous") as store:
        store.http.init(slots)
        put_data_into_kvstore(HOST, store.port, "global", "key", "the value", KEY)
        for rank, names in ((0, {"global/key"}), (0, {"global/key"}), (1, set())):
            proven = store.proven("DELETE", f"/global/{rank}")
            assert store.send("DELETE", f"/global/{rank}", Horovod_Proof=proven)[0] == 200
            assert store.names() == names

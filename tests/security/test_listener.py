"""What the services listen with: it survives failures, keeps no process from ending, and ends those in excess."""

from __future__ import annotations

import resource
import socket
import socketserver
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http import http_server

from tests.security.stores import HOST, started

SECOND = "127.0.0.2"
# A launcher's process, which ends when it has said on which port it can be reached.
PROGRAM = """
import sys
from horovod.runner.http.http_server import RendezvousServer
print(RendezvousServer([], ["127.0.0.1"]).port, flush=True)
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


@pytest.mark.parametrize("address", [HOST, SECOND])
def test_listening_goes_on_when_there_are_file_descriptors_again(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, tries = socket.socket.accept, []

    def count(self: socket.socket) -> tuple[socket.socket, Any]:
        tries.append(self)
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", count)
    with started([HOST, SECOND]) as store, socket.socket() as connection:
        connection.settimeout(5)
        with no_more_files():
            connection.connect((address, store.port))
            time.sleep(0.5)
        assert 0 < len(tries) < 20  # not all the time
        assert store.serves(address)


@pytest.mark.parametrize("address", [HOST, SECOND])
def test_listening_goes_on_when_no_thread_could_be_started(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    with started([HOST, SECOND]) as store:
        monkeypatch.setattr(socketserver.ThreadingMixIn, "process_request", fail)
        with socket.create_connection((address, store.port), timeout=5) as connection:
            assert connection.recv(1) == b""
        assert store.serves(address)


def test_strangers_do_not_keep_a_process_from_ending() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
        ExitStack() as stack,
    ):
        assert process.stdin
        assert process.stdout
        port = int(process.stdout.readline())
        for _ in range(20):
            stack.enter_context(socket.create_connection((HOST, port), timeout=5)).sendall(b"G")
        process.stdin.close()
        try:
            assert process.wait(http_server.STRANGERS_SECONDS / 2) == 0
        finally:
            process.kill()


def test_a_rank_that_leaves_twice_counts_once() -> None:
    slots = [SlotInfo("localhost", rank, rank, 0, 2, 2, 1) for rank in range(2)]
    with started(plan=slots) as store:
        store.ask("PUT", "global/key", b"the value")
        for rank, names in ((0, {"scope/key", "global/key"}), (0, {"scope/key", "global/key"}), (1, {"scope/key"})):
            assert store.ask("DELETE", f"global/{rank}") == (200, b"")
            assert store.names() == names

"""Many connections and requests at once: the job is served in time meanwhile, and what they take is bounded."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from horovod.runner.common.util.network import BasicClient, BasicService, PingRequest, PingResponse
from horovod.runner.util import listener

from tests.security.attacks import payload
from tests.security.stores import HOST, KEY, Store

BURST = 1500
SENDERS = 8
HELD = 200
# Threads whose connection has been ended, and which have yet to notice.
ENDING = 40
FLOOD_S = 2.0


def test_slow_connections_keep_nobody_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "UNPROVEN_SECONDS", 1.5)
    slow = [socket.create_connection((HOST, store.port), timeout=15) for _ in range(2)]
    for connection in slow:
        connection.sendall(b"G")
    ended, began = 0, time.monotonic()
    while ended < len(slow) and time.monotonic() - began < 10:
        ended = 0
        for connection in slow:
            try:
                connection.sendall(b"a")  # a byte now and then, for as long as it is let
            except OSError:
                ended += 1
        assert store.serves()
        time.sleep(0.1)
    for connection in slow:
        connection.close()
    assert ended == len(slow)
    assert time.monotonic() - began < 5


def test_there_are_no_more_threads_than_connections_that_may_be_unproven(store: Store) -> None:
    before = threading.active_count()
    many = [socket.create_connection((HOST, store.port), timeout=15) for _ in range(3 * listener.UNPROVEN_CONNECTIONS)]
    assert store.serves()
    deadline = time.monotonic() + 5
    while threading.active_count() - before > listener.UNPROVEN_CONNECTIONS and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() - before <= listener.UNPROVEN_CONNECTIONS
    for connection in many:
        connection.close()
    assert store.serves()


class Watch:
    """What this process takes, looked at while it is under attack, less what it took before."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._threads, self._files = threading.active_count(), self._process.num_fds()
        self.threads: list[int] = []
        self.files: list[int] = []

    def look(self) -> None:
        self.threads.append(threading.active_count() - self._threads)
        self.files.append(self._process.num_fds() - self._files)

    def is_as_before(self) -> bool:
        """Whether all files are closed again; waits for that."""
        deadline = time.monotonic() + 10
        while self._process.num_fds() > self._files and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._process.num_fds() <= self._files


def test_a_burst_of_requests_holds_nobody_up(store: Store, tmp_path: Path) -> None:
    body, watch = payload(tmp_path / "marker"), Watch()
    with ThreadPoolExecutor(SENDERS) as pool:
        sent = [pool.submit(store.send, "PUT", f"/runfunc/{number}", body) for number in range(BURST)]
        while not all(one.done() for one in sent):
            assert store.serves()
            watch.look()
        statuses = {one.result()[0] for one in sent}
    assert len(watch.threads) > 3
    # Each sender has a connection, with two ends, and waits for its answer.
    assert max(watch.threads) <= SENDERS + listener.UNPROVEN_CONNECTIONS
    assert max(watch.files) <= 2 * SENDERS + listener.UNPROVEN_CONNECTIONS
    assert statuses <= {403, 0}
    assert not (tmp_path / "marker").exists()
    assert store.names() == {"scope/key"}
    assert watch.is_as_before()
    assert not store.http._unproven


@contextmanager
def flood(port: int) -> Iterator[None]:
    """Open connections all the time, without a byte, and hold the newest of them."""
    held: deque[socket.socket] = deque()
    stopped = threading.Event()

    def connect() -> None:
        while not stopped.is_set():
            try:
                held.append(socket.create_connection((HOST, port), timeout=5))
            except OSError:
                continue
            if len(held) > HELD:
                held.popleft().close()

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        for connection in held:
            connection.close()


def test_a_flood_of_connections_holds_nobody_up(store: Store) -> None:
    watch, until = Watch(), time.monotonic() + FLOOD_S
    with flood(store.port):
        while time.monotonic() < until:
            assert store.serves()
            watch.look()
    assert max(watch.files) > HELD  # it was one
    assert max(watch.threads) <= listener.UNPROVEN_CONNECTIONS + ENDING
    assert max(watch.files) <= HELD + listener.UNPROVEN_CONNECTIONS + ENDING
    assert store.serves()
    assert watch.is_as_before()


def test_a_flood_of_connections_does_not_keep_an_elastic_rank_from_answering() -> None:
    service = BasicService("a service", KEY, ["lo"])
    client = BasicClient("a service", service.addresses(), KEY, 0, attempts=3)
    watch, until, slowest = Watch(), time.monotonic() + FLOOD_S, 0.0
    with flood(service.get_port()):
        while time.monotonic() < until:
            began = time.monotonic()
            assert isinstance(client._send(PingRequest()), PingResponse)
            slowest = max(slowest, time.monotonic() - began)
            watch.look()
    assert slowest < 5
    assert max(watch.files) > HELD
    assert max(watch.threads) <= listener.UNPROVEN_CONNECTIONS + ENDING
    service.shutdown()

"""Many connections and requests at once: the job is served in time meanwhile, and what they take is bounded."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from horovod.runner.http import http_server

from tests.security.attacks import payload
from tests.security.stores import HOST, Store

BURST = 1500
SENDERS = 8


@pytest.mark.distributed
def test_slow_connections_keep_nobody_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "STRANGERS_SECONDS", 1.5)
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


@pytest.mark.distributed
def test_a_burst_of_requests_holds_nobody_up(store: Store, tmp_path: Path) -> None:
    body, watch = payload(tmp_path / "marker"), Watch()
    with ThreadPoolExecutor(SENDERS) as pool:
        sent = [pool.submit(store.send, "PUT", f"/runfunc/{number}", body) for number in range(BURST)]
        while not all(request.done() for request in sent):
            assert store.serves()
            watch.look()
        statuses = {request.result()[0] for request in sent}
    assert len(watch.threads) > 3
    # Each sender has a connection, with two ends, and waits for its answer.
    assert max(watch.threads) <= SENDERS + http_server.STRANGERS
    assert max(watch.files) <= 2 * SENDERS + http_server.STRANGERS
    assert statuses <= {404, 0}
    assert not (tmp_path / "marker").exists()
    assert store.names() == {"scope/key"}
    assert watch.is_as_before()
    assert not store.server.servers[0]._strangers

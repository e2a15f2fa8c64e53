"""The connection between two watchers: nothing on it blocks, fills the memory, or is taken for what it is not."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator

import pytest

from tests.unit.hang_watchers import TOKEN, Ranks, both, endpoint, listener, spoke_of, waiting
from trainer.ops.watcher import wire
from trainer.ops.watcher.wire import Link, RefusedError, connect, is_timeout

__all__ = ["listener"]


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    """The hub's side of a connection and the other one, which have proven themselves."""
    left, right = socket.socketpair()
    hub, other = Link(left, TOKEN, is_hub=True), Link(right, TOKEN, is_hub=False)
    hub.flush()
    assert not list(other.receive())
    assert not list(hub.receive())
    yield hub, other
    left.close()
    right.close()


def test_a_message_comes_in_pieces_and_before_the_end_of_the_connection(links: tuple[Link, Link]) -> None:
    hub, other = links
    hub.send({"n": 1})
    data = other.socket.recv(1000)
    for number, byte in enumerate(data):
        hub.socket.send(bytes([byte]))
        assert list(other.receive()) == ([{"n": 1}] if number == len(data) - 1 else [])
    hub.send({"n": 2})
    hub.close()
    found = other.receive()
    assert next(found) == {"n": 2}
    with pytest.raises(RefusedError, match="ended"):
        next(found)


def test_a_message_that_is_sent_back_is_refused(links: tuple[Link, Link]) -> None:
    hub, other = links
    hub.send({"n": 1})
    other.socket.send(other.socket.recv(1000))
    with pytest.raises(RefusedError, match="no watcher of this job"):
        list(hub.receive())


def test_a_length_that_is_never_reached_is_refused(links: tuple[Link, Link]) -> None:
    hub, other = links
    other.socket.send(wire._HEAD.pack(wire._MOST_BYTES) + bytes(32))
    with pytest.raises(RefusedError, match=f"a message of {wire._MOST_BYTES} bytes"):
        list(hub.receive())


def test_who_takes_no_messages_is_refused_and_not_waited_for(
    links: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_MOST_WAITING", 1 << 20)
    hub, _ = links
    hub.send({"text": "x" * (1 << 19)})
    assert hub.wants_to_write
    started = time.monotonic()
    hub.flush_for(0.05)
    assert time.monotonic() - started < 0.9
    hub.send({"text": "x" * (1 << 20)})
    with pytest.raises(RefusedError, match="takes no more"):
        list(hub.receive())


def test_a_watcher_does_not_wait_for_a_hub_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waits = []
        for _ in range(3):  # of which the system answers one
            waits.append(socket.socket())
            waits[-1].setblocking(False)
            waits[-1].connect_ex(full.getsockname())
        spoke = spoke_of(both(), 1, Ranks(waiting(1)), endpoint(full), None)
        started = time.monotonic()
        spoke.tick()
        spoke.tick()
        assert spoke.sources, "it still connects"
        spoke.leave()
        assert time.monotonic() - started < 1.0
        for one in waits:
            one.close()


def test_the_system_tells_of_a_host_that_does_not_answer(listener: socket.socket) -> None:
    link = connect(endpoint(listener), TOKEN)
    assert link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == wire.TIMEOUT_S * 1000
    link.close()
    for number in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
        assert is_timeout(OSError(number, ""))

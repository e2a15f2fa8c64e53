"""Watchers of a job on two hosts, in this process, whose ranks are no processes."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence

import pytest

from trainer.watch.heartbeat import State
from trainer.watch.hub import Hub
from trainer.watch.judge import Host, View
from trainer.watch.ranks import LocalRanks
from trainer.watch.spoke import Spoke
from trainer.watch.wire import serve

TOKEN = "ab" * 32


class Ranks(LocalRanks):
    """Ranks of a host that are no processes."""

    def __init__(self, *views: View) -> None:
        super().__init__({})
        self.seen = {view.rank: view for view in views}
        self.ended: tuple[str, tuple[int, ...]] | None = None
        self.noted = ""

    def views(self) -> dict[int, View]:
        return dict(self.seen)

    def views_with_stacks(self) -> dict[int, View]:
        return dict(self.seen)

    def note_why(self, said: str) -> None:
        self.noted = said

    def end(self, said: str, culprits: tuple[int, ...]) -> None:
        self.ended = (said, culprits)


def waiting(rank: int, steps: int = 9) -> View:
    return View(rank=rank, state=State.WAITING, what="gradients", steps=steps)


def both() -> list[Host]:
    return [Host("a", (0,)), Host("b", (1,))]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with serve("127.0.0.1") as server:
        yield server


def endpoint(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def make(listener: socket.socket, ranks: Ranks, given_s: float = 0.2, hosts: Sequence[Host] = ()) -> Hub:
    return Hub(hosts or both(), ranks, listener, TOKEN, given_s, "job")


def run(*watchers: Hub | Spoke, seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not any(one.verdict for one in watchers):
        for one in watchers:
            one.tick()
        time.sleep(0.01)

"""Watchers of a job on two hosts, in this process, whose ranks are no processes."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence

import pytest

from trainer.ops.watcher.job import Host, Job, View
from trainer.ops.watcher.ranks import LocalRanks
from trainer.ops.watcher.watcher import Hub, Spoke
from trainer.watch.heartbeat import State

TOKEN = "ab" * 32


class Ranks(LocalRanks):
    """Ranks of a host that are no processes."""

    def __init__(self, *views: View) -> None:
        super().__init__({})
        self.seen = {view.rank: view for view in views}
        self.ended: tuple[str, Sequence[int]] | None = None

    def views(self) -> dict[int, View]:
        return dict(self.seen)

    def views_with_stacks(self) -> dict[int, View]:
        return dict(self.seen)

    def end(self, said: str, culprits: Sequence[int]) -> None:
        self.ended = (said, culprits)


def waiting(rank: int, steps: int = 9) -> View:
    return View(rank=rank, state=State.WAITING, what="gradients", steps=steps)


def both() -> list[Host]:
    return [Host("a", (0,)), Host("b", (1,))]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def endpoint(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def job_of(hosts: Sequence[Host], number: int, endpoint: str, given_s: float | None) -> Job:
    start_s = max(given_s or 0.0, 1800.0)
    return Job(list(hosts), number, TOKEN, given_s, start_s, endpoint, "job")


def hub_of(hosts: Sequence[Host], ranks: Ranks, listener: socket.socket | None, given_s: float | None) -> Hub:
    return Hub(job_of(hosts, 0, "", given_s), ranks, listener)


def spoke_of(hosts: Sequence[Host], number: int, ranks: Ranks, endpoint: str, given_s: float | None) -> Spoke:
    return Spoke(job_of(hosts, number, endpoint, given_s), ranks)


def make(listener: socket.socket, ranks: Ranks, given_s: float = 0.2, hosts: Sequence[Host] = ()) -> Hub:
    return hub_of(hosts or both(), ranks, listener, given_s)


def run(*watchers: Hub | Spoke, seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not any(watcher.verdict for watcher in watchers):
        for watcher in watchers:
            watcher.tick()
        time.sleep(0.01)

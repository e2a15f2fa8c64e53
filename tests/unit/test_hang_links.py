"""The hub over time, with a clock that is set: connections that come and go, and when it looks and judges."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.hang_watchers import TOKEN, Ranks, both, hub_of, waiting
from trainer.ops.watcher.job import UNREACHABLE, Host, View
from trainer.ops.watcher.wire import Link, RefusedError


class Job:
    """A hub whose rank 0 waits, and the watcher of a host b with rank 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.hosts, self.ranks = both(), Ranks(waiting(0))
        self.hub = hub_of(self.hosts, self.ranks, None, 20.0)
        self.sockets: list[socket.socket] = []

    @property
    def other(self) -> Host:
        return self.hosts[1]

    def connect(self) -> Link:
        left, right = socket.socketpair()
        self.sockets += [left, right]
        self.hub._links.append(Link(left, TOKEN, is_hub=True))
        link = Link(right, TOKEN, is_hub=False)
        self.hub.tick()
        list(link.receive())
        self.hub.tick()
        return link

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.hub.tick()

    def hear(self, link: Link, *views: View, **more: Any) -> None:
        link.send({"host": 1, "views": [view.as_dict() for view in views], **more})
        self.hub.tick()

    def look(self, link: Link) -> None:
        """Have nothing happen until the hub has asked the other watcher to look."""
        self.hear(link, View(rank=1, steps=9))
        for _ in range(3):
            self.after(7.0)
            self.hear(link, View(rank=1, steps=9))
        assert {"do": "look"} in list(link.receive())
        assert self.hub.verdict is None


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    job = Job(monkeypatch)
    yield job
    for one in job.sockets:
        one.close()


def test_a_host_that_connects_again_has_one_connection(job: Job) -> None:
    first, second = job.connect(), job.connect()
    job.hear(first)
    job.hear(second)
    assert len(job.hub._links) == 1
    assert job.other.problem == ""
    with pytest.raises(RefusedError):
        list(first.receive())
    assert list(second.receive()) == []


def test_a_host_that_is_silent_is_lost_until_it_is_heard(job: Job) -> None:
    link = job.connect()
    job.hear(link)
    job.after(14.0)
    assert job.other.problem == ""
    job.after(2.0)
    assert job.other.problem == UNREACHABLE
    job.hear(job.connect())
    assert job.other.problem == ""


def test_no_host_is_lost_while_the_hub_slept_or_after_it_said_goodbye(job: Job) -> None:
    link = job.connect()
    job.hear(link)
    job.now += 100.0
    job.hub.postpone()
    job.hub.tick()
    assert job.other.problem == ""
    job.hear(link, bye=True)
    job.after(16.0)
    assert (job.other.has_left, job.other.problem) == (True, "")


def test_the_hub_is_heard_every_two_seconds(job: Job) -> None:
    link = job.connect()
    job.hear(link)
    for seconds, heard in ((1.9, []), (0.2, [{"do": "go on"}]), (1.9, [])):
        job.after(seconds)
        assert list(link.receive()) == heard


@pytest.mark.parametrize(
    "message",
    [
        {"host": 7},
        {"host": -1},
        {"host": 0},
        {"host": "b"},
        {"views": []},
        {"host": 1, "views": [{"odd": 1}]},
        {"host": 1, "views": 3},
    ],
)
def test_a_message_that_cannot_be_read_ends_its_connection_and_not_the_watch(job: Job, message: dict[str, Any]) -> None:
    job.connect().send(message)
    job.hub.tick()
    assert job.hub._links == []
    assert job.hosts[0].problem == ""


def test_nobody_is_blamed_before_the_other_host_has_looked(job: Job) -> None:
    link = job.connect()
    job.look(link)
    job.after(1.0)
    assert not job.hub.verdict
    job.hear(link, View(rank=1, steps=9, stacks="all", frames=("line 12, in load",)), looked=True)
    assert "    line 12, in load" in getattr(job.hub.verdict, "lines", ())


def test_a_rank_that_goes_on_while_it_is_looked_at_hangs_no_more(job: Job) -> None:
    link = job.connect()
    job.look(link)
    job.hear(link, View(rank=1, steps=9, events=1))
    job.hear(link, View(rank=1, steps=9, events=1), looked=True)
    job.after(7.0)
    assert job.hub.verdict is None


def test_a_job_that_is_stopped_while_it_is_looked_at_counts_anew(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    link = job.connect()
    job.look(link)
    for _ in range(2):
        job.ranks.seen[0] = waiting(0).replaced(process="T")
        job.after(0.1)
        job.ranks.seen[0] = waiting(0)
        job.hear(link, View(rank=1, steps=9), looked=True)
        job.after(7.0)
    assert job.hub.verdict is None
    assert capfd.readouterr().err.count("the job's ranks are stopped") == 2


def test_a_host_that_slept_while_it_was_looking_counts_anew(job: Job) -> None:
    link = job.connect()
    job.look(link)
    job.hub.postpone()
    job.hear(link, View(rank=1, steps=9), looked=True)
    assert job.hub.verdict is None


class Compiling(Ranks):
    """Ranks of which only the stack tells that one compiles."""

    looks = 0

    def views_with_stacks(self) -> dict[int, View]:
        self.looks += 1
        return {**self.seen, 1: self.seen[1].replaced(excuse="compiles", stacks="compile_fx")}


def test_what_a_stack_excuses_holds_until_the_next_look_which_is_not_at_once(job: Job) -> None:
    ranks = Compiling(waiting(0), View(rank=1, steps=9))
    hub = hub_of([Host("a", (0, 1))], ranks, None, 20.0)
    hub.tick()
    looks = []
    for seconds in (21.0, 1.0, 10.0, 6.0, 1.0):
        job.now += seconds
        hub.tick()
        looks.append(ranks.looks)
    assert hub.verdict is None
    assert looks == [1, 1, 1, 2, 2]

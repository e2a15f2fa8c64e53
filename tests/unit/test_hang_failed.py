"""The hub of a job that has failed: it hears all hosts, and says once which rank called another collective."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

import pytest

from tests.unit.hang_watchers import Ranks, both, endpoint, listener, make, spoke_of, waiting
from trainer.ops.watcher import watcher as watcher_module
from trainer.ops.watcher.job import Host, View
from trainer.ops.watcher.watcher import Hub, Spoke
from trainer.watch import failure
from trainer.watch.heartbeat import State

__all__ = ["listener"]


def connected(listener: socket.socket, here: Ranks, there: Ranks, hosts: Sequence[Host] = ()) -> tuple[Hub, Spoke]:
    """The watchers of two hosts, of which the hub has heard the other."""
    hub, spoke = make(listener, here, 60.0, hosts), spoke_of(both(), 1, there, endpoint(listener), 60.0)
    deadline = time.monotonic() + 3
    while not hub._hosts[1].heard_at and time.monotonic() < deadline:
        hub.tick()
        spoke.tick()
        time.sleep(0.01)
    assert hub._hosts[1].heard_at
    return hub, spoke


def calling(rank: int, elements: int) -> View:
    return View(rank=rank, state=State.WAITING, what="all_reduce", is_counted=True, elements=elements, steps=9)


def failed(rank: int, elements: int) -> View:
    return calling(rank, elements).replaced(state=State.FAILED, failures=1)


def test_a_failed_collective_is_explained_once_with_what_the_other_host_says(
    listener: socket.socket, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = list[str]()
    monkeypatch.setattr(watcher_module, "write_verdict", lambda kind, text: noted.append(f"{kind}: {text}"))
    here, there = Ranks(waiting(0)), Ranks(waiting(1))
    hub, spoke = connected(listener, here, there)
    there.seen[1] = failed(1, 11)
    asked = time.monotonic()
    while hub._hosts[1].views[1].state != State.FAILED and time.monotonic() < asked + 2:
        hub.tick()
        spoke.tick()
    assert time.monotonic() - asked < 0.5, "a report of a failure does not wait for its time"
    here.seen[0] = failed(0, 10)
    while "why it failed" not in (printed := capfd.readouterr().err) and time.monotonic() < asked + 3:
        hub.tick()
        spoke.tick()
    assert time.monotonic() - asked < failure._LET_WATCHER_EXPLAIN_S
    hub.tick()
    spoke.leave()
    hub.leave()
    assert printed + capfd.readouterr().err == (
        "trainer: why it failed: rank 0 on a called all_reduce of 10 elements (collective 1, after step 9)\n"
        "trainer: why it failed: rank 1 on b called all_reduce of 11 elements (collective 1, after step 9)\n"
        "trainer: why it failed: every rank has to call the same collectives in the same order, with tensors of the "
        "same shape\n"
    )
    called = "rank 0 on a called all_reduce of 10 elements (collective 1, after step 9); rank 1 on b called"
    assert [text.partition(called)[0] for text in noted] == ["different collectives: "]


def test_what_a_host_said_before_the_failure_is_not_taken_for_the_last(
    listener: socket.socket, capfd: pytest.CaptureFixture[str]
) -> None:
    hosts = [Host("a", (0, 1)), Host("b", (2, 3))]
    here, there = Ranks(waiting(0), waiting(1)), Ranks(waiting(2), waiting(3))
    hub, spoke = connected(listener, here, there, hosts)
    here.seen = {0: failed(0, 10), 1: failed(1, 11)}
    there.seen = {2: calling(2, 10), 3: calling(3, 10)}
    began = time.monotonic()
    while "why it failed" not in (printed := capfd.readouterr().err) and time.monotonic() < began + 3:
        hub.tick()
        spoke.tick()
    assert time.monotonic() - began < watcher_module._LAST_WORDS_S, "the other host was asked"
    assert "rank 1 on a called all_reduce of 11 elements" in printed.splitlines()[0]
    assert "ranks 0, 2, 3 called all_reduce of 10 elements" in printed.splitlines()[1]


def test_a_hub_whose_ranks_have_failed_hears_the_last_words_of_the_others(
    listener: socket.socket, capfd: pytest.CaptureFixture[str]
) -> None:
    here, there = Ranks(waiting(0)), Ranks(waiting(1))
    hub, spoke = connected(listener, here, there)
    here.seen[0], there.seen[1] = failed(0, 10), failed(1, 11)
    leaving = threading.Timer(0.2, spoke.leave)
    leaving.start()
    hub.leave()
    leaving.join()
    assert capfd.readouterr().err.count("trainer: why it failed: ") == 3


@pytest.mark.parametrize("is_failed", [True, False])
def test_where_the_ranks_here_have_ended_the_others_are_heard(
    listener: socket.socket, capfd: pytest.CaptureFixture[str], is_failed: bool
) -> None:
    there = Ranks(waiting(1))
    hub, spoke = connected(listener, Ranks(View(rank=0, steps=9, is_at_end=True, process="X")), there)
    there.seen[1] = failed(1, 10) if is_failed else View(rank=1, steps=9, is_at_end=True, process="X")
    leaving = threading.Timer(0.2, spoke.leave)
    leaving.start()
    started = time.monotonic()
    hub.leave()
    assert time.monotonic() - started < 0.6, "it waits for no more than the other's goodbye"
    leaving.join()
    assert ("rank 0 on a has ended" in capfd.readouterr().err) is is_failed

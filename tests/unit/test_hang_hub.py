"""The hub: it hears the other watchers alone, and finds a host that is silent."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import time
from collections.abc import Callable

import pytest

from tests.unit.hang_watchers import TOKEN, Ranks, both, endpoint, hub_of, listener, make, run, spoke_of, waiting
from trainer.ops.watcher import limits as limits_module
from trainer.ops.watcher import watcher as watcher_module
from trainer.ops.watcher import wire
from trainer.ops.watcher.job import WORKS, Host, View
from trainer.ops.watcher.wire import Link, RefusedError, connect, is_timeout
from trainer.watch.heartbeat import State

__all__ = ["listener"]


def test_the_hub_hears_the_other_host_and_names_the_rank_that_does_not_wait(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    monkeypatch.chdir(str(tmp_path))
    here, there = Ranks(waiting(0)), Ranks(View(rank=1, steps=9))
    hub = make(listener, here)
    spoke = spoke_of(both(), 1, there, endpoint(listener), 0.2)
    run(hub, spoke)
    assert hub.verdict is not None
    assert hub.verdict.culprits == (1,)
    hub.end()
    deadline = time.monotonic() + 2
    while there.ended is None and time.monotonic() < deadline:
        spoke.tick()
    assert here.ended == there.ended == (hub.verdict.first, (1,))
    hub.leave()
    spoke.leave()
    printed = capfd.readouterr().err
    assert printed.count("trainer: hang: no progress for") == 1
    assert all(line.startswith("trainer: hang: ") for line in printed.splitlines())
    assert "every rank's stack is in runs/job-hang-" in printed


def test_a_disk_that_does_not_answer_keeps_no_verdict_back(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watcher_module, "_WRITTEN_S", 0.1)
    monkeypatch.setattr(watcher_module, "_write", lambda *_: time.sleep(1.0))
    ranks = Ranks(waiting(0), View(rank=1, steps=9))
    hub = hub_of([Host("a", (0, 1))], ranks, None, 0.1)
    run(hub)
    started = time.monotonic()
    hub.end()
    assert time.monotonic() - started < 0.9
    assert ranks.ended is not None
    printed = capfd.readouterr().err.splitlines()
    assert printed[0].startswith("trainer: hang: no progress for")
    assert printed[-1].startswith("trainer: hang: the ranks' stacks cannot be written: the disk does not answer")


def test_a_job_that_goes_on_gets_no_verdict(listener: socket.socket) -> None:
    ranks = Ranks(waiting(0))
    hub = hub_of([Host("a", (0,))], ranks, None, 0.2)
    for events in range(50):
        ranks.seen[0] = View(rank=0, state=State.WAITING, steps=9, events=events)
        hub.tick()
        time.sleep(0.01)
    assert hub.verdict is None
    run(hub)
    assert hub.verdict is not None


@pytest.mark.parametrize("excuse", ["debugger", "compiles"])
def test_who_debugs_or_compiles_is_waited_for(listener: socket.socket, excuse: str) -> None:
    hub = hub_of([Host("a", (0, 1))], Ranks(waiting(0), View(rank=1, steps=9, excuse=excuse)), None, 0.1)
    run(hub, seconds=0.5)
    assert hub.verdict is None


@pytest.mark.parametrize(("given_s", "is_judged"), [(None, False), (0.1, True)])
def test_who_works_is_waited_for_unless_the_user_has_set_the_limit(
    monkeypatch: pytest.MonkeyPatch, given_s: float | None, is_judged: bool
) -> None:
    monkeypatch.setattr(limits_module, "LEAST_S", 0.1)
    ranks = Ranks(waiting(0, 0), waiting(1, 8))
    hub = hub_of([Host("a", (0, 1))], ranks, None, given_s)
    for steps in range(1, 9):  # past the start, whose limit is longer
        ranks.seen[0] = waiting(0, steps)
        hub.tick()
    ranks.seen[1] = View(rank=1, steps=8, excuse=WORKS)
    run(hub, seconds=1.0)
    assert (hub.verdict is not None) is is_judged


@pytest.mark.parametrize(("excuse", "is_judged"), [("debugger", False), ("compiles", True)])
def test_a_compiler_is_waited_for_up_to_the_longest_time_and_a_debugger_for_ever(
    monkeypatch: pytest.MonkeyPatch, excuse: str, is_judged: bool
) -> None:
    monkeypatch.setattr(limits_module, "LONGEST_S", 0.2)
    monkeypatch.setattr(watcher_module, "_LOOK_AGAIN_S", 0.05)
    hub = hub_of([Host("a", (0, 1))], Ranks(waiting(0), View(rank=1, steps=9, excuse=excuse)), None, 0.1)
    run(hub, seconds=0.6)
    assert (hub.verdict is not None) is is_judged


@pytest.mark.parametrize(("excuse", "count"), [("", 1), (WORKS, 1), ("compiles", 0)])
def test_what_is_waited_for_is_said_once_in_a_wait_and_nothing_is_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], excuse: str, count: int
) -> None:
    monkeypatch.setattr(watcher_module, "_NOTICE_S", 0.1)
    ranks = Ranks(waiting(0, 1), View(rank=1, steps=1, excuse=excuse, at="train.py:31"))  # whose limit is 540 s
    hub = hub_of([Host("a", (0, 1))], ranks, None, None)
    run(hub, seconds=0.6)
    assert hub.verdict is None
    printed = capfd.readouterr().err
    assert printed.count("trainer: rank 0 has waited") == count
    assert printed.count("rank 1 on a is in user code at train.py:31") == count
    for events, seconds, more in ((1, 0.15, 0), (2, 0.35, count)):  # twice as long before the next one
        ranks.seen[0] = View(rank=0, state=State.WAITING, what="gradients", steps=1, events=events)
        run(hub, seconds=seconds)
        assert capfd.readouterr().err.count("has waited") == more


def test_where_a_verdict_is_near_no_notice_comes_before(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watcher_module, "_NOTICE_S", 0.2)
    hub = hub_of([Host("a", (0, 1))], Ranks(waiting(0), View(rank=1, steps=9)), None, 0.3)
    run(hub)
    assert hub.verdict is not None
    assert "waited" not in capfd.readouterr().err


def test_a_stopped_job_is_waited_for_and_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(View(rank=0, steps=9, process="T"), View(rank=1, steps=9, process="T"))
    hub = hub_of([Host("a", (0, 1))], ranks, None, 0.1)
    run(hub, seconds=0.5)
    assert hub.verdict is None
    assert capfd.readouterr().err.count("the job's ranks are stopped") == 1


def test_a_host_that_slept_counts_anew() -> None:
    hub = hub_of([Host("a", (0, 1))], Ranks(waiting(0), View(rank=1, steps=9)), None, 0.3)
    hub.tick()
    time.sleep(0.35)
    hub.postpone()
    run(hub, seconds=0.2)
    assert hub.verdict is None
    run(hub)
    assert hub.verdict is not None


def test_a_host_that_does_not_answer_is_unreachable(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "_LOOK_S", 0.5)
    monkeypatch.setattr(watcher_module, "_ANSWER_S", 0.3)
    hub = make(listener, Ranks(waiting(0)))
    spoke = spoke_of(both(), 1, Ranks(waiting(1)), endpoint(listener), None)
    deadline = time.monotonic() + 2
    while 1 not in [one.host for one in hub._links] and time.monotonic() < deadline:
        hub.tick()
        spoke.tick()
    run(hub)  # the other one says nothing any more
    assert hub.verdict is not None
    assert "rank 1 on b cannot be asked: host unreachable" in hub.verdict.lines
    spoke.leave()
    hub.leave()


def test_a_host_that_has_said_goodbye_is_not_lost(listener: socket.socket) -> None:
    hosts = both()
    hub = hub_of(hosts, Ranks(waiting(0)), listener, None)
    spoke = spoke_of(both(), 1, Ranks(View(rank=1, process="X")), endpoint(listener), None)
    run(hub, spoke, seconds=0.2)
    spoke.leave()
    run(hub, seconds=0.2)
    assert (hosts[1].has_left, hosts[1].problem) == (True, "")


def test_a_watcher_that_never_connects_is_said_once(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watcher_module, "SILENT_S", 0.1)
    run(make(listener, Ranks(View(rank=0))), seconds=0.4)
    assert capfd.readouterr().err.count("the watcher of b has not connected") == 1


def test_who_does_not_know_the_token_is_not_heard(listener: socket.socket) -> None:
    hosts = both()
    hub = hub_of(hosts, Ranks(waiting(0)), listener, None)
    stranger = connect(endpoint(listener), "cd" * 32)
    hub.tick()
    time.sleep(0.05)
    list(stranger.receive())
    stranger.send({"host": 1, "views": []})
    hub.tick()
    assert hub._links == []
    assert hosts[1].heard_at == 0
    stranger.close()


def test_a_message_that_was_changed_or_comes_twice_is_refused() -> None:
    changes: list[Callable[[bytes], bytes]] = [lambda data: data[:-2] + b"2}", lambda data: data + data]
    for change in changes:
        left, right = socket.socketpair()
        hub, other = Link(left, TOKEN, is_hub=True), Link(right, TOKEN, is_hub=False)
        hub.flush()
        list(other.receive())
        list(hub.receive())
        sent = bytearray()
        other.socket = Capture(sent)  # type: ignore[assignment]
        other.send({"n": 1})
        right.send(change(bytes(sent)))
        with pytest.raises(RefusedError, match="no watcher of this job"):
            list(hub.receive())
        left.close()
        right.close()


class Capture:
    def __init__(self, sent: bytearray) -> None:
        self._sent = sent

    def send(self, data: bytes) -> int:
        self._sent += data
        return len(data)


def test_connections_that_prove_nothing_are_few_and_short(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = make(listener, Ranks(waiting(0)))
    strangers = [socket.create_connection(listener.getsockname()) for _ in range(watcher_module._MOST_UNPROVEN + 9)]
    hub.tick()
    assert len(hub._links) == watcher_module._MOST_UNPROVEN + 2, "and one for each host"
    monkeypatch.setattr(watcher_module, "TIMEOUT_S", 0.0)
    hub.tick()
    assert hub._links == []
    for one in strangers:
        one.close()


def test_all_hosts_may_connect_at_once_and_their_reports_are_judged_together(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, same = ([Host(f"host-{rank}", (rank,)) for rank in range(121)] for _ in range(2))
    hub = make(listener, Ranks(waiting(0)), 60.0, hosts)
    spokes = [spoke_of(same, rank, Ranks(waiting(rank)), endpoint(listener), 60.0) for rank in range(1, 121)]
    monkeypatch.setattr(watcher_module, "_CONNECT_AGAIN_S", 60.0)
    for _ in range(4):
        for spoke in spokes:
            spoke.tick()
        hub.tick()
    assert sum(link.is_proven for link in hub._links) == 120
    looked: list[int] = []
    monkeypatch.setattr(hub._limit, "on_progress", lambda views, now: looked.append(len(views)))
    for rank, spoke in enumerate(spokes, 1):
        spoke._send(spoke._links[0], {rank: waiting(rank, 10)})
    hub.tick()
    assert looked == [121], "once, as it looks at each rank of the job"


def test_more_than_a_thousand_connections_can_be_waited_for(listener: socket.socket) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    try:
        late = fcntl.fcntl(listener, fcntl.F_DUPFD, 1500)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with socket.create_connection(listener.getsockname()):
        started = time.monotonic()
        wire.wait([late], 5.0)
        assert time.monotonic() - started < 4.0
    os.close(late)


def test_only_a_connection_that_times_out_is_a_lost_host() -> None:
    assert is_timeout(OSError(110, "timed out"))
    assert not is_timeout(ConnectionResetError(104, "reset"))
    assert not is_timeout(RefusedError("it has ended the connection"))
    assert wire.TIMEOUT_S == 10.0

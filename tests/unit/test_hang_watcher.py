"""The watcher of a host: how long it watches, and what it does on a host without rank 0."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.hang_watchers import Ranks, both, endpoint, job_of, listener, make, run, spoke_of, waiting
from trainer.ops.watcher import __main__ as program
from trainer.ops.watcher import watcher as watcher_module
from trainer.ops.watcher.job import WORKS, Host, View
from trainer.ops.watcher.watcher import Hub, Spoke

__all__ = ["listener"]

# A rank that has joined, and waits for nothing.
RANK = """
import sys
from trainer.watch import heartbeat
print(heartbeat.open_record(0), flush=True)
sys.stdin.read()
"""


class Watched:
    """A watcher that notes what it is told."""

    sources = ()

    def __init__(self, verdict: object = None) -> None:
        self.verdict = verdict
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.calls.append(name)


def watch(watched: Watched, monkeypatch: pytest.MonkeyPatch, *clock: float) -> list[str]:
    """Have one tick watched, at these times; return the calls."""
    monkeypatch.setattr(program, "_TICK_S", 0.0)
    monkeypatch.setattr(program, "_clock", iter(clock).__next__)
    ended = iter((False, True))

    class Ended(SimpleNamespace):
        are_gone = property(lambda _: next(ended))

    program._watch(watched, Ended(running=[]))  # type: ignore[arg-type]
    return watched.calls


def test_the_watcher_says_goodbye_when_its_ranks_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch(Watched(), monkeypatch, 0.0, 1.0, 100.0) == ["tick", "leave"]  # a tick that takes long is no sleep


def test_a_watcher_that_slept_counts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch(Watched(), monkeypatch, 0.0, 6.0, 6.0) == ["postpone", "tick", "leave"]


def test_a_verdict_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch(Watched("it hangs"), monkeypatch, 0.0, 1.0, 1.0) == ["tick", "end"]


def test_the_watcher_survives_the_signals_of_its_job_and_ends_with_its_rank() -> None:
    command = [sys.executable, "-c", RANK]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        settings = asdict(job_of([], 0, "", None)) | {"hosts": [["a", [0]]], "listener": []}
        settings["records"] = {0: rank.stdout.readline().strip()}
        # As start.py does it: a signal that comes before they are ignored waits.
        earlier = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        watcher = subprocess.Popen([sys.executable, "-S", "-m", "trainer.ops.watcher"], stdin=subprocess.PIPE)
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
        for number in program._IGNORED:
            watcher.send_signal(number)
        assert watcher.stdin is not None
        watcher.stdin.write(json.dumps(settings).encode())
        watcher.stdin.close()
        time.sleep(0.5)
        assert watcher.poll() is None
        rank.stdin.close()
        assert watcher.wait(timeout=5) == 0


def cut_off(spoke: Spoke, listener: socket.socket) -> Hub:
    """Have a watcher hear the hub, and then nothing from it any more. Return the hub, whose connection stays open."""
    hub = make(listener, Ranks(waiting(0)), 60.0)
    run(hub, spoke, seconds=0.3)
    listener.close()
    return hub


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("views", "is_judged"),
    [
        ([waiting(1)], True),
        ([waiting(1), View(rank=2, steps=9)], True),
        ([View(rank=1, steps=9)], False),  # waits for nobody
        ([waiting(1), View(rank=2, steps=9, excuse=WORKS)], False),
        ([View(rank=1, steps=9, state=waiting(1).state, process="T")], False),
    ],
)
def test_the_hosts_without_rank_0_say_that_its_host_is_unreachable(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, views: list[View], is_judged: bool
) -> None:
    hosts = [Host("a", (0,)), Host("b", tuple(view.rank for view in views))]
    spoke = spoke_of(hosts, 1, Ranks(*views), endpoint(listener), 0.2)
    hub = cut_off(spoke, listener)
    monkeypatch.setattr(watcher_module, "SILENT_S", 0.3)
    run(spoke, seconds=3.0 if is_judged else 1.0)
    assert (spoke.verdict is not None) is is_judged
    if spoke.verdict is not None:
        assert "host unreachable: a, which has rank 0, seen from b" in spoke.verdict.first
    hub.leave()


def test_a_rank_that_goes_on_while_it_is_looked_at_blames_nobody() -> None:
    class Going(Ranks):
        def views_with_stacks(self) -> dict[int, View]:
            return {1: waiting(1, 10)}

    spoke = spoke_of(both(), 1, Going(waiting(1, 9)), "127.0.0.1:1", 0.2)
    spoke._note(spoke._here, spoke._ranks.views())
    spoke._judge(time.monotonic() + 60.0)
    assert spoke.verdict is None


def test_a_host_that_refuses_a_connection_can_be_reached(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher_module, "_CONNECT_AGAIN_S", 0.1)
    spoke = spoke_of(both(), 1, Ranks(waiting(1)), endpoint(listener), 0.2)
    hub = cut_off(spoke, listener)
    monkeypatch.setattr(watcher_module, "SILENT_S", 0.3)
    run(spoke, seconds=1.0)
    assert spoke.verdict is None
    hub.leave()


@pytest.mark.distributed
def test_a_host_without_rank_0_that_slept_counts_anew(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    spoke = spoke_of(both(), 1, Ranks(waiting(1)), endpoint(listener), 0.5)
    hub = cut_off(spoke, listener)
    monkeypatch.setattr(watcher_module, "SILENT_S", 0.3)
    run(spoke, seconds=0.4)  # which finds that the hub is silent
    time.sleep(0.6)
    spoke.postpone()
    spoke.tick()
    is_judged_at_once = spoke.verdict is not None
    run(spoke)
    assert (is_judged_at_once, spoke.verdict is not None) == (False, True)
    hub.leave()


def test_a_hub_that_has_ended_leaves_the_job_alone(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "SILENT_S", 0.1)
    hub = make(listener, Ranks(waiting(0)), 60.0)
    there = Ranks(waiting(1))
    spoke = spoke_of(both(), 1, there, endpoint(listener), 0.1)
    deadline = time.monotonic() + 2
    while not hub._links and time.monotonic() < deadline:
        hub.tick()
        spoke.tick()
    hub.leave()
    run(spoke, seconds=0.5)
    assert spoke.verdict is None
    assert there.ended is None


def test_a_hub_that_was_never_there_is_looked_for_six_times(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[None] = []

    def refuse(*_: str) -> None:
        tries.append(None)
        raise ConnectionRefusedError(111, "refused")

    monkeypatch.setattr(watcher_module, "_CONNECT_AGAIN_S", 0.0)
    monkeypatch.setattr(watcher_module, "connect", refuse)
    run(spoke_of(both(), 1, Ranks(waiting(1)), "127.0.0.1:1", None), seconds=0.3)
    assert len(tries) == 6

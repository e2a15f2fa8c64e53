"""An attempt while it runs: which ranks have died, whether any makes progress, and hosts that stop to answer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.ops.supervise import attempt as module
from trainer.ops.supervise.attempt import Running
from trainer.ops.supervise.hosts import Host
from trainer.ops.supervise.options import Options
from trainer.ops.supervise.outcome import Attempt
from trainer.ops.supervise.remote import Answer
from trainer.ops.supervise.signals import Signals
from trainer.watch.heartbeat import Heartbeat

HOSTS = (Host("localhost", 1), Host("b", 1))
Note = Callable[..., None]


@pytest.fixture
def attempt() -> Attempt:
    return Attempt(hosts=HOSTS)


@pytest.fixture
def running(attempt: Attempt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Running:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    options = Options(np=2, hosts=HOSTS, min_np=1, command=("true",), timeout_s=100.0)
    return Running(attempt, "job", options, Signals((), ()))


def heartbeat(number: int, process: int, **reported: Any) -> Heartbeat:
    values = {"phase": "training", "progress_s": time.monotonic(), **reported}
    return Heartbeat(pid=process, rank=number, **values)


def ended_process() -> int:
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    return process


def test_ranks_that_are_gone_are_dead_unless_they_had_ended(running: Running, attempt: Attempt) -> None:
    running.note("localhost", heartbeat(0, os.getpid()))
    running.note("localhost", heartbeat(1, ended_process()))
    running.note("localhost", heartbeat(2, ended_process(), phase="done"))
    running.note("localhost", heartbeat(3, ended_process(), phase="preempted"))
    running.read()
    assert (attempt.dead, attempt.left) == ([1], [2, 3])
    running.note("localhost", heartbeat(4, ended_process()))
    running.read()
    assert attempt.dead == [1], "those that die later have followed the first"


def test_a_rank_of_another_host_is_not_looked_for_here(running: Running, attempt: Attempt) -> None:
    running.note("b", heartbeat(1, ended_process()))
    running.read()
    assert attempt.dead == ()


@pytest.mark.parametrize(
    ("reported", "is_idle"),
    [
        ({"progress_s": -150}, True),
        ({"progress_s": -50}, False),
        ({"progress_s": -150, "phase": "done"}, False),
        (None, False),  # before a rank has joined
    ],
)
def test_a_job_hangs_once_no_working_rank_has_reported_progress(
    running: Running, attempt: Attempt, reported: dict[str, Any] | None, is_idle: bool
) -> None:
    now = time.monotonic()
    attempt.progress_at = now - 200
    if reported is not None:
        running.note("localhost", heartbeat(0, os.getpid(), **{**reported, "progress_s": now + reported["progress_s"]}))
    assert (running.idle_s is not None) == is_idle


def test_updates_span_all_ranks(running: Running, attempt: Attempt) -> None:
    before = attempt.updates
    running.note("localhost", heartbeat(0, os.getpid(), updates=20, first_update=11, first_update_s=5.0))
    running.note("b", heartbeat(1, 1, updates=21, first_update=11, first_update_s=900.0))
    running.note("b", heartbeat(2, 1))
    assert (before, attempt.updates, attempt.first_update_at) == (None, (11, 21), 5.0)


def test_a_host_that_stops_to_answer_is_lost(
    running: Running, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [Answer(host="localhost"), Answer(host="b", problem="no route")]
    monkeypatch.setattr(module, "on_all_hosts", lambda *_: answers)
    monkeypatch.setattr(module, "_POLL_S", 0.0)
    running.note("localhost", heartbeat(0, os.getpid()))

    def ask() -> set[str]:
        running.read()
        return running.lost

    assert [ask(), ask()] == [set(), set()], "while there is progress nobody is asked"
    attempt.progress_at = time.monotonic() - 60
    assert ask() == set(), "once may be bad luck"
    assert ask() == {"b"}
    answers[1] = Answer(host="b")
    assert ask() == set()

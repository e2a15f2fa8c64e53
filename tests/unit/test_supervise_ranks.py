"""An attempt while it runs: whether any rank makes progress, and hosts that stop to answer."""

from __future__ import annotations

import os
import time
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


@pytest.mark.parametrize(
    ("reported", "is_idle"),
    [
        ({"progress_s": -150}, True),
        ({"progress_s": -50}, False),
        ({"progress_s": -150, "phase": "done"}, False),
        (None, True),  # before a rank has joined, since the launcher's start
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


def test_without_a_timeout_of_ones_own_ranks_out_of_sight_are_not_idle(attempt: Attempt) -> None:
    options = Options(np=2, hosts=HOSTS, min_np=1, command=("true",))
    running, now = Running(attempt, "job", options, Signals((), ())), time.monotonic()
    attempt.progress_at = now - 1000
    assert running.idle_s is None
    running.note("localhost", heartbeat(0, os.getpid(), progress_s=now - 1000))
    assert running.idle_s is not None


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

"""The ranks of an attempt: which have died, whether any makes progress, and hosts that stop to answer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.ops.supervise import remote
from trainer.ops.supervise.hosts import Host
from trainer.ops.supervise.ranks import Ranks
from trainer.ops.supervise.remote import Answer
from trainer.watch.heartbeat import Heartbeat

HOSTS = (Host("localhost", 1), Host("b", 1))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Ranks]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = Ranks(HOSTS, "job", timeout_s=100.0)
    yield made
    made.close()
    made._inquiry._pool.shutdown()  # which nothing else waits for


def heartbeat(number: int, process: int, **reported: Any) -> Heartbeat:
    values = {"phase": "training", "progress_s": time.monotonic(), **reported}
    return Heartbeat(pid=process, rank=number, **values)


def ended_process() -> int:
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    return process


def test_ranks_that_are_gone_are_dead_unless_they_had_ended(ranks: Ranks) -> None:
    ranks.note("localhost", heartbeat(0, os.getpid()))
    ranks.note("localhost", heartbeat(1, ended_process()))
    ranks.note("localhost", heartbeat(2, ended_process(), phase="done"))
    ranks.note("localhost", heartbeat(3, ended_process(), phase="preempted"))
    ranks.read()
    assert (ranks.dead, ranks.ended) == ((1,), (2, 3))
    ranks.note("localhost", heartbeat(4, ended_process()))
    ranks.read()
    assert ranks.dead == (1,), "those that die later have followed the first"
    assert len(ranks.descriptors) == 1


def test_progress_is_whatever_a_rank_reports(ranks: Ranks) -> None:
    now = time.monotonic()
    ranks.progress_at = now - 200
    ranks.note("localhost", heartbeat(0, os.getpid(), progress_s=now - 150))
    assert ranks.idle_s == pytest.approx(150, abs=5)
    ranks.note("localhost", heartbeat(0, os.getpid(), progress_s=now - 50))
    assert ranks.idle_s is None


def test_nothing_is_expected_of_a_rank_that_has_ended_its_work(ranks: Ranks) -> None:
    ranks.progress_at = time.monotonic() - 200
    ranks.note("localhost", heartbeat(0, os.getpid(), progress_s=1.0, phase="done"))
    assert ranks.idle_s is None


def test_before_a_rank_has_joined_there_is_no_hang(ranks: Ranks) -> None:
    ranks.progress_at = time.monotonic() - 200
    assert ranks.idle_s is None


def test_without_a_timeout_nothing_hangs(tmp_path: Path) -> None:
    ranks = Ranks(HOSTS, "job", timeout_s=0.0)
    ranks.note("localhost", heartbeat(0, os.getpid(), progress_s=1.0))
    ranks.progress_at = time.monotonic() - 1e6
    assert ranks.idle_s is None
    ranks.close()


def test_updates_span_all_ranks(ranks: Ranks) -> None:
    before = ranks.updates
    ranks.note("localhost", heartbeat(0, os.getpid(), updates=20, first_update=11, first_update_s=5.0))
    ranks.note("b", heartbeat(1, 1, updates=21, first_update=11, first_update_s=900.0))
    ranks.note("b", heartbeat(2, 1))
    assert (before, ranks.updates) == (None, (11, 21))
    assert ranks.first_update_at == 5.0


def test_a_host_that_stops_to_answer_is_lost(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [Answer("localhost", True), Answer("b", False, problem="no route")]
    monkeypatch.setattr(remote, "on_all_hosts", lambda *_: answers)
    monkeypatch.setattr(ranks._inquiry, "_every_s", 0.0)
    ranks.note("localhost", heartbeat(0, os.getpid()))

    def ask() -> set[str]:
        for _ in range(2):  # asks, and takes the answer
            ranks.read()
            time.sleep(0.05)
        return ranks.lost

    assert ask() == set(), "while there is progress nobody is asked"
    ranks.progress_at = time.monotonic() - 60
    assert ask() == set(), "once may be bad luck"
    assert ask() == {"b"}
    answers[1] = Answer("b", True)
    assert ask() == set()

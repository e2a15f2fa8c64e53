"""What a watcher concludes of a rank's process from several looks, and how it ends one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.cluster.processes import Process
from trainer.ops.watcher import ranks as ranks_module
from trainer.ops.watcher.job import WORKS, View
from trainer.ops.watcher.ranks import LocalRank, LocalRanks
from trainer.watch import heartbeat

# A rank that cannot be ended by a signal it may ignore.
IGNORES = """
import signal, time
from trainer.watch import heartbeat
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(heartbeat.open_record(0), flush=True)
time.sleep(60)
"""


class Looked:
    """This process as rank 0, whose looks from outside are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, record: Path) -> None:
        self.rank = LocalRank(0, str(record))
        self.now, self.process, self.asked = 1000.0, Process("S", 0.0), 0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(ranks_module, "look", lambda *_, **__: self.process)
        monkeypatch.setattr(ranks_module, "takes_signal", lambda _: True)
        monkeypatch.setattr(self.rank, "signal", self._ask)

    def _ask(self, _: int) -> None:
        self.asked += 1

    def after(self, seconds: float, state: str = "S", cpu_s: float = 0.0) -> View:
        self.now, self.process = self.now + seconds, Process(state, cpu_s)
        return self.rank.view()


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Looked]:
    record = heartbeat.open_record(0)
    assert record is not None
    yield Looked(monkeypatch, record)
    heartbeat.close_record()


def test_a_moment_of_uninterruptible_sleep_is_none(looked: Looked) -> None:
    states = [looked.after(2.0, state).process for state in ("R", "D", "S", "D", "D", "D", "S")]
    assert states == ["R", "S", "S", "S", "D", "D", "S"]


def test_the_share_of_a_processor_is_that_since_the_last_look(looked: Looked) -> None:
    assert looked.after(0.0, cpu_s=700.0).cpu == 0.0  # since it began, which tells nothing of now
    assert looked.after(2.0, cpu_s=701.0).cpu == 0.5
    assert looked.after(0.1, cpu_s=701.1).cpu == 0.5  # too short to tell
    assert looked.after(1.9, cpu_s=701.0).cpu == 0.0


@pytest.mark.parametrize(("state", "excuse"), [("T", ""), ("D", WORKS)])
def test_who_is_stopped_is_asked_for_no_stack(looked: Looked, state: str, excuse: str) -> None:
    looked.after(2.0, state)
    looked.after(2.0, state)
    assert looked.rank.ask() is None
    assert looked.asked == 0
    assert looked.rank.with_stacks(None, children_work=False).excuse == excuse
    looked.after(2.0)
    assert looked.rank.ask() is not None


def test_a_rank_works_that_has_computed_since_it_did_something_last(looked: Looked) -> None:
    looked.after(0.0, cpu_s=500.0)
    looked.after(40.0, cpu_s=500.5)
    assert looked.rank.with_stacks(0, children_work=False).excuse == ""  # whatever it has computed before
    looked.after(40.0, cpu_s=520.0)
    assert looked.rank.with_stacks(0, children_work=False).excuse == WORKS
    heartbeat.progress()
    looked.after(1.0, cpu_s=520.0)
    looked.after(40.0, cpu_s=520.5)
    assert looked.rank.with_stacks(0, children_work=False).excuse == ""


def test_it_is_the_thread_that_trains_which_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[int, int]]()

    def look(pid: int, thread: int) -> Process:
        seen.append((pid, thread))
        return Process("S", 0.0)

    monkeypatch.setattr(ranks_module, "look", look)
    LocalRank(0, str(heartbeat.open_record(0))).view()
    heartbeat.close_record()
    assert seen == [(os.getpid(), threading.get_native_id())]


def test_who_ignores_the_first_signal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "_TERMINATED_S", 0.1)
    with subprocess.Popen([sys.executable, "-c", IGNORES], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        LocalRanks({0: process.stdout.readline().decode().strip()}).end()
        assert process.wait(timeout=5) == -signal.SIGKILL

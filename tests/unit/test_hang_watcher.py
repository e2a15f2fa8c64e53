"""The program of a watcher: how long it watches."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.hang_watchers import settings_of
from trainer.ops.watcher import __main__ as program

# A rank that has joined, and waits for nothing.
RANK = """
import sys
from trainer.watch import heartbeat
print(heartbeat.open_record(0), flush=True)
sys.stdin.read()
"""


class Watched:
    """A watcher that notes what it is told."""

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


def test_the_watcher_says_why_when_its_ranks_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
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
        settings = asdict(settings_of(None, 2)) | {"records": {0: rank.stdout.readline().strip()}}
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

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trainer.cluster import forks


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_wait_s", 0.2)


@contextmanager
def native_thread(seconds: float) -> Iterator[threading.Thread]:
    """A thread that computes without the GIL, in pieces of some milliseconds."""
    end = time.monotonic() + seconds

    def compute() -> None:
        while time.monotonic() < end:
            hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 20_000)

    thread = threading.Thread(target=compute)
    thread.start()
    yield thread
    thread.join()


def test_a_fork_waits_for_threads_that_run() -> None:
    with native_thread(0.05) as thread:
        forks._wait_for_threads()
        assert not thread.is_alive()


def test_a_fork_does_not_wait_for_ever() -> None:
    with native_thread(1.0) as thread:
        forks._wait_for_threads()
        assert thread.is_alive()
        begun = time.monotonic()
        forks._wait_for_threads()  # and is less patient from then on
        assert time.monotonic() - begun < 0.15

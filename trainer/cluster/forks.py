"""Forks of a process whose other threads run native code: DataLoader's workers, above all."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from trainer.cluster.processes import read_process

_TASKS = Path("/proc/self/task")
_wait_s = 0.2
_SHORT_WAIT_S = 0.01
"""The wait once a thread has not slept for the whole time: it may be a thread that never sleeps."""
_POLL_S = 0.0005


@cache
def wait_for_threads_before_forks() -> None:
    """Have every `os.fork` of this process wait until its other threads sleep, for a bounded time.

    A thread of Horovod or Gloo that lets go of a tensor makes a state of Python's, under a lock of Python's. A child
    that is forked at that moment inherits the lock as taken, and hangs before its first line: the rank then waits for a
    DataLoader worker for ever. Python 3.11.8 and 3.12.1 mend it (https://github.com/python/cpython/issues/112275);
    Debian 12 has 3.11.2. Between epochs these threads have nothing left to do, so that a moment is enough.
    """
    if _TASKS.is_dir() and (sys.version_info < (3, 11, 8) or sys.version_info[:3] == (3, 12, 0)):
        os.register_at_fork(before=_wait_for_threads)


def _wait_for_threads() -> None:
    global _wait_s
    deadline = time.monotonic() + _wait_s
    while _other_threads_run():
        if time.monotonic() >= deadline:
            _wait_s = _SHORT_WAIT_S
            return
        time.sleep(_POLL_S)  # which gives them the GIL that they may wait for


def _other_threads_run() -> bool:
    this = str(threading.get_native_id())
    for task in _TASKS.iterdir():
        with suppress(OSError):  # it has ended
            if task.name != this and read_process("self", task.name).state != "S":
                return True
    return False

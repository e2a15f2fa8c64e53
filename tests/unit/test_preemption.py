"""Signals that announce the end of a job: noted, and what ends the process where nobody saves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from trainer.checkpoint.run.preemption import Preemption

SCRIPT = """
import os, signal, sys, time
from trainer.checkpoint.run.preemption import Preemption
preemption = Preemption(lambda: {is_saved}, grace_s=0.5)
{before}
os.kill(os.getpid(), signal.SIGUSR2)
{after}
"""


def run(is_saved: str = "False", before: str = "", after: str = "time.sleep(30)") -> tuple[int, str, float]:
    """Return the exit code, the output, and the seconds of a process that gets a signal."""
    script = SCRIPT.format(is_saved=is_saved, before=before, after=after)
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - started


@pytest.fixture
def preemption() -> Iterator[Preemption]:
    preemption = Preemption(lambda: False, grace_s=60)
    yield preemption
    preemption.close()


def test_a_signal_sets_a_flag_and_the_program_goes_on(preemption: Preemption) -> None:
    assert preemption.received is None
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM):
        os.kill(os.getpid(), number)
    assert preemption.received is signal.SIGTERM


def test_afterwards_signals_are_handled_as_before() -> None:
    earlier = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)]
    preemption = Preemption(lambda: False, grace_s=60)
    assert signal.getsignal(signal.SIGTERM) != earlier[0]
    preemption.close()
    preemption.close()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)] == earlier
    assert signal.set_wakeup_fd(-1) == -1


def test_a_process_that_has_saved_asks_for_another_start() -> None:
    assert run(is_saved="True")[:2] == (75, "")


def test_one_that_cannot_save_ends_when_the_time_is_over() -> None:
    code, output, _ = run()
    assert (code, output) == (128 + signal.SIGUSR2, "trainer: SIGUSR2: not saved within 0.5 s\n")


def test_one_that_waits_in_a_library_is_watched_as_well() -> None:
    # Python runs no handler while its main thread is in another library's code, as in a collective.
    code, _, _ = run(after="import ctypes; ctypes.CDLL(None).sleep(30)")
    assert code == 128 + signal.SIGUSR2


def test_the_end_of_python_is_not_ended_by_the_signal() -> None:
    # An object of the module sys is deleted after the handlers. A job script repeats the signal until all ranks end.
    late = "class Late:\n    def __del__(self, kill=os.kill, process=os.getpid()): kill(process, 12)\nsys.late = Late()"
    assert run(before=late, after="sys.exit(75)")[:2] == (75, "")


def test_a_child_ends_by_the_signal_and_tells_the_parent_nothing(preemption: Preemption) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    time.sleep(0.2)
    assert preemption.received is None

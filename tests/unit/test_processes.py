"""Running a job to its end: what it said, and interrupts meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from trainer.launch.processes import INTERRUPTS, Finished, interrupt_on, run


def finished(stdout: str = "", stderr: str = "") -> Finished:
    return Finished(code=1, stdout=stdout, stderr=stderr, seconds=1.0)


def test_the_last_line_is_the_one_that_means_something() -> None:
    ours = "trainer: the loss turned nan\nERROR failed (exitcode: 1)\n=========\n"
    assert finished(stderr=ours).last_line == "trainer: the loss turned nan"
    assert finished(stderr="trainer: 2 ranks; tuned: idle yield\nno such file\n---").last_line == "no such file"
    assert finished(stdout="usage: x\n").last_line == "usage: x"
    assert finished().problem == "exit code 1: no output"


def test_a_job_that_is_ended_may_say_much() -> None:
    """More than a pipe holds: who is told to end has to get rid of it first."""
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (sys.stderr.write('x' * 500_000 + chr(10) + 'bye'), sys.exit(3)))\n"
        "time.sleep(60)"
    )
    started = time.monotonic()
    done = run([sys.executable, "-c", script], env=os.environ, timeout_s=2.0)
    assert done.code is None
    assert done.last_line == "bye"
    assert time.monotonic() - started < 15


def test_an_interrupt_while_a_job_is_ended_is_heard_afterwards() -> None:
    earlier = {number: signal.getsignal(number) for number in INTERRUPTS}
    slow = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.5), exit()))\ntime.sleep(60)"
    timer = threading.Timer(2.5, os.kill, (os.getpid(), signal.SIGHUP))
    interrupt_on(*INTERRUPTS)
    try:
        timer.start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run([sys.executable, "-c", slow], env=os.environ, timeout_s=2.0)
        assert time.monotonic() - started > 3.2  # not before it had ended
    finally:
        timer.cancel()
        for number, handler in earlier.items():
            signal.signal(number, handler)

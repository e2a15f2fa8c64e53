"""Preemption: the signals with which a scheduler or a supervisor announces the end of a job.

A signal only sets a flag: all ranks agree on the update after which they save. A thread watches the flag as well. It
ends the process if the ranks cannot agree in time, because a rank has gone say, or in a long evaluation.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from trainer.cluster import exit_codes
from trainer.watch.failure import end_process
from trainer.watch.heartbeat import PREEMPTED, note, report_phase

SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class Preemption:
    """The signals of `SIGNALS` that came since it was made, and what a signal leads to.

    Args:
        is_saved: called in a thread. Returns whether all that the process has to save is saved.
        grace_s: seconds after which the process ends in any case.
    """

    def __init__(self, is_saved: Callable[[], bool], grace_s: float) -> None:
        self.received: signal.Signals | None = None
        """The first signal that came."""
        self._is_saved, self._grace_s, self._closed = is_saved, grace_s, threading.Event()
        self._earlier: dict[signal.Signals, object] = {}
        if threading.current_thread() is not threading.main_thread():
            return  # Python takes signals in its main thread only
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # The main thread runs no handler while it waits in a collective; this pipe is written at once.
        self._earlier_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            self._earlier[number] = signal.signal(number, self._note)
        atexit.register(_ignore_usr2)
        threading.Thread(target=self._watch, args=(reader,), name="trainer-preemption", daemon=True).start()

    def close(self) -> None:
        """Handle signals as before."""
        self._closed.set()
        if not self._earlier:
            return
        atexit.unregister(_ignore_usr2)
        for number, handler in self._earlier.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal has returned
        self._earlier.clear()
        signal.set_wakeup_fd(self._earlier_wakeup)
        os.close(self._writer)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)

    def _watch(self, reader: int) -> None:
        while data := os.read(reader, 64):
            if number := next((known for known in SIGNALS if known in data), None):
                break  # and leave the pipe open: other signals follow, such as those of workers that end
        else:  # closed
            os.close(reader)
            return
        self.received = self.received or number
        note(signal=number)
        if self._closed.wait(self._grace_s):
            return
        if self._is_saved():
            report_phase(PREEMPTED)
            end_process("", exit_codes.PREEMPTED)
        end_process(f"{self.received.name}: not saved within {self._grace_s:g} s", 128 + self.received)


def _ignore_usr2() -> None:
    """Ignore SIGUSR2 until the process has ended.

    Python gives each signal with a handler its default action back as it ends. A job script repeats SIGUSR2 until the
    ranks have ended. A rank that has saved and is leaving the job would then end with another exit code.
    """
    if threading.current_thread() is threading.main_thread():  # the thread that watches ends the process at once
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _leave_signals() -> None:
    """Keep a forked child, such as a loader's worker, from taking signals: the flag and the pipe are the rank's.

    A loader ends its workers by SIGTERM. But Slurm sends SIGUSR2 to all processes of a rank, and the rank would fail
    without its workers before it has saved.
    """
    for number, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGUSR2, signal.SIG_IGN)):
        if isinstance(getattr(signal.getsignal(number), "__self__", None), Preemption):
            signal.signal(number, handler)
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_signals)

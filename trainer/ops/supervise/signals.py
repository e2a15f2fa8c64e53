"""The signals that `trainer run` is sent, and waiting for one of them, or for the end of a process."""

from __future__ import annotations

import select
import signal
import socket
import threading
from collections.abc import Collection, Iterable
from contextlib import suppress
from types import FrameType

_PREEMPTS = (signal.SIGTERM, signal.SIGUSR2)
_INTERRUPTS = (signal.SIGINT, signal.SIGHUP)


class Signals:
    """Context that notes signals instead of acting on them; a signal that is ignored stays ignored.

    Args:
        preempts: signals that ask to save and end.
        interrupts: signals that end the job at once.
    """

    def __init__(self, preempts: Collection[int] = _PREEMPTS, interrupts: Collection[int] = _INTERRUPTS) -> None:
        self._preempts, self._interrupts = preempts, interrupts
        self.preempts = False
        """Whether a signal has asked to save and end."""
        self.interrupted_by: int | None = None
        """The signal that ends the job at once: an interrupt, or a second request to save and end."""
        self._reader, self._writer = socket.socketpair()
        self._earlier: dict[int, object] = {}

    def __enter__(self) -> Signals:
        for end in (self._reader, self._writer):
            end.setblocking(False)
        if threading.current_thread() is threading.main_thread():  # no other thread gets signals
            self._earlier_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            for number in (*self._preempts, *self._interrupts):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._earlier[number] = signal.signal(number, self._note)
            # Wakes the waiting when a launcher ends.
            self._earlier[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._earlier:
            signal.set_wakeup_fd(self._earlier_wakeup)
        self._reader.close()
        self._writer.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._preempts and not self.preempts:
            self.preempts = True
        else:
            self.interrupted_by = self.interrupted_by or number

    @property
    def has_any(self) -> bool:
        """Whether any signal has come."""
        return self.preempts or self.interrupted_by is not None

    def wait(self, seconds: float, descriptors: Iterable[int] = ()) -> None:
        """Wait for a signal, for the end of a child, for one of the descriptors, or for this long."""
        select.select([self._reader.fileno(), *descriptors], [], [], max(0.0, seconds))
        with suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

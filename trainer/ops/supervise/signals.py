"""The signals that a supervisor is sent while it waits."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Collection
from types import FrameType

TICK_S = 0.1


class Signals:
    """Context that notes signals instead of acting on them; a signal that is ignored stays ignored.

    Args:
        preempts: signals that ask to save and end.
        interrupts: signals that end the job at once.
    """

    def __init__(self, preempts: Collection[int], interrupts: Collection[int]) -> None:
        self._preempts, self._interrupts = preempts, interrupts
        self.preempts = False
        """Whether a signal has asked to save and end."""
        self.interrupted_by: int | None = None
        """The signal that ends the job at once: an interrupt, or a second request to save and end."""
        self._earlier: dict[int, object] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # no other thread gets signals
            for number in (*self._preempts, *self._interrupts):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._earlier[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._preempts and not self.preempts:
            self.preempts = True
        else:
            self.interrupted_by = self.interrupted_by or number

    @property
    def has_any(self) -> bool:
        """Whether any signal has come."""
        return self.preempts or self.interrupted_by is not None

    def tick(self) -> None:
        """Let a moment pass."""
        time.sleep(TICK_S)

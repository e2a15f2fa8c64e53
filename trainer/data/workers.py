"""Worker processes of a loader, which do not end by the signal that announces a preemption."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def usr2_blocked() -> Iterator[None]:
    """Context in which this thread starts processes that SIGUSR2 does not reach, however they are started.

    Slurm sends it to all processes of a rank, and the rank would fail without its workers before it has saved. A
    process that is forked could ignore it from its first line on. One that is spawned begins with the default action,
    which ends it, but with the blocked signals of the thread that has started it. This process gets a signal that
    comes meanwhile afterwards.
    """
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)

"""Failure handling: an uncaught exception on one rank ends the whole job, with one clear message."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from contextlib import suppress
from types import TracebackType

from trainer.errors import ConfigError, TrainerError
from trainer.launch.environment import Launch, read_launch

# A user's mistake usually fails every rank. The other ranks wait this long before they print: the launcher has ended
# them by then, so that the line appears once.
_LET_RANK_0_PRINT_FIRST_S = 5.0
# A rank that lost its peer knows less than the peer does, so the peer may print first.
_LET_PEER_PRINT_FIRST_S = 3.0
# Horovod's and torch.distributed's exceptions for a rank that has gone.
_LOST_PEER = ("HorovodInternalError", "DistBackendError")
_LOST_PEER_OF_GLOO = "gloo/transport"


def report_failures() -> None:
    """Install an exception hook that ends the whole job when this rank fails.

    Without it, Python's shutdown on the failing rank waits for Horovod's, which waits for ranks that wait for an
    all-reduce: a hang. With it, the failing rank prints its rank, its host and the error, and exits with code 1 at
    once; every launcher then ends the other ranks. `Trainer` and `prepare` call this; a script that reads data first
    calls it in its first line.
    """
    # An interactive session goes on after a mistake.
    if not hasattr(sys, "ps1"):
        sys.excepthook = _end_job


def _end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    launch = Launch()
    with suppress(ConfigError):  # an unreadable launch may be the very error
        launch = read_launch()
    if issubclass(kind, KeyboardInterrupt):
        _exit_now("interrupted" if launch.rank == 0 else "", 130)
    rank = f"rank {launch.rank} on host {socket.gethostname()}: " if launch.size > 1 else ""
    if issubclass(kind, TrainerError):
        if launch.rank != 0:
            time.sleep(_LET_RANK_0_PRINT_FIRST_S)
        _exit_now(f"{rank}{error}", 1)
    if launch.size > 1 and (kind.__name__ in _LOST_PEER or _LOST_PEER_OF_GLOO in str(error)):
        time.sleep(_LET_PEER_PRINT_FIRST_S)
        _exit_now(f"{rank}lost another rank, and with it the job ({kind.__name__})", 1)
    traceback.print_exception(kind, error, trace, file=sys.__stderr__)
    _exit_now(f"{rank}{kind.__name__}: {error}", 1)


def _exit_now(message: str, code: int) -> None:
    """End this process without atexit handlers, which would wait for other ranks."""
    # The reader of our output may be gone already; that must not keep this rank alive.
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    # Not sys.stderr: torch.distributed wraps the hook and buffers what it prints.
    with suppress(OSError, ValueError):
        if message:
            print(f"trainer: {message}", file=sys.__stderr__, flush=True)
    os._exit(code)

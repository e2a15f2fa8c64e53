"""How a failing rank ends the whole job, with one clear message, instead of hanging it."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from contextlib import suppress
from types import TracebackType

from trainer.config import Launch, read_launch
from trainer.errors import ConfigError, TrainerError

# Ranks come to the same mistake within seconds of each other, and a launcher then stops the rest. Whoever waits
# that long before speaking is heard only when it failed alone.
_LET_RANK_0_SPEAK_S = 5.0
# A rank that lost its peer knows less than the peer: it leaves the word to it for this long.
_LET_THE_CULPRIT_SPEAK_S = 3.0
# How Horovod's and torch.distributed's own exceptions say that another rank has gone.
_LOST_PEER = ("HorovodInternalError", "DistBackendError")
_LOST_PEER_OF_GLOO = "gloo/transport"


def report_failures() -> None:
    """From here on an uncaught exception on one rank ends the whole job, with one clear message.

    Without this, Python's own shutdown on the failing rank waits for Horovod's, which waits for ranks that
    wait for an all-reduce: a hang. The rank that fails says who and where it is and leaves at once, with
    exit code 1; every launcher then stops the others. `Trainer` and `prepare` call this; a script that reads
    data first calls it in its first line.
    """
    # Whoever types at a prompt wants to go on after a mistake.
    if not hasattr(sys, "ps1"):
        sys.excepthook = _end_job


def _end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    launch = Launch()
    with suppress(ConfigError):  # that nobody can tell who this is may be the very error
        launch = read_launch()
    if issubclass(kind, KeyboardInterrupt):
        _leave("interrupted" if launch.rank == 0 else "", 130)
    place = f"rank {launch.rank} on host {socket.gethostname()}: " if launch.size > 1 else ""
    if issubclass(kind, TrainerError):
        if launch.rank != 0:
            time.sleep(_LET_RANK_0_SPEAK_S)
        _leave(f"{place}{error}", 1)
    if launch.size > 1 and (kind.__name__ in _LOST_PEER or _LOST_PEER_OF_GLOO in str(error)):
        time.sleep(_LET_THE_CULPRIT_SPEAK_S)
        _leave(f"{place}lost another rank, and with it the job ({kind.__name__})", 1)
    traceback.print_exception(kind, error, trace, file=sys.__stderr__)
    _leave(f"{place}{kind.__name__}: {error}", 1)


def _leave(message: str, code: int) -> None:
    """Ends this process without atexit handlers, which would wait for ranks that wait for us."""
    # Whoever read our output may be gone already; that must not keep us.
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    # Not sys.stderr: torch.distributed wraps the hook and collects what it prints, for a time after it.
    with suppress(OSError, ValueError):
        if message:
            print(f"trainer: {message}", file=sys.__stderr__, flush=True)
    os._exit(code)

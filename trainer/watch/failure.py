"""Failure handling: an uncaught exception on one rank ends the whole job, with one clear message."""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from trainer.cluster import exit_codes
from trainer.cluster.environment import Launch, launches, read_launch
from trainer.cluster.output import print_line
from trainer.errors import ConfigError, DataError, TrainerError, name_rank
from trainer.watch.heartbeat import LOST_PEER, MISTAKE, report_failure
from trainer.watch.stack import Frame, collective_of

# A user's mistake usually fails every rank. The other ranks wait this long before they print: the launcher has ended
# them by then, so that the line appears once.
_LET_RANK_0_PRINT_FIRST_S = 5.0
# A rank that lost its peer knows less than the peer does, so the peer may print first.
_LET_PEER_PRINT_FIRST_S = 3.0
# The watcher says which ranks had called another collective, once it has heard all of them.
_LET_WATCHER_EXPLAIN_S = 1.5
# Horovod's and torch.distributed's exceptions for a rank that has gone.
_LOST_PEER = ("HorovodInternalError", "DistBackendError")
_LOST_PEER_OF_GLOO = "gloo/transport"
# Time for exit handlers, by which other libraries write what they hold, such as loggers of metrics.
_EXIT_S = 3.0
_LET_SIGNALS_COME_S = 0.05

_earlier_hooks: list[Callable[..., object]] = []
_collective_handlers: list[Callable[[], object]] = []


def report_failures() -> None:
    """Install an exception hook that ends the whole job when this rank fails.

    Without it, Python's shutdown on the failing rank waits for Horovod's, which waits for ranks that wait for an
    all-reduce: a hang. With it, the failing rank prints its rank, its host and the error, and exits at once, with
    code 1, or 78 for a `ConfigError` or `DataError`; every launcher then ends the other ranks. `trainer.init` and
    `Trainer` call this; a script that reads data first calls it in its first line. A hook that was there before shows
    the traceback. Exit handlers get 3 seconds.
    """
    # An interactive session goes on after a mistake.
    if not hasattr(sys, "ps1") and sys.excepthook is not _end_job:
        if sys.excepthook is not sys.__excepthook__:
            _earlier_hooks.append(sys.excepthook)
        sys.excepthook = _end_job


def at_exit(handler: Callable[[], object]) -> None:
    """Register an exit handler that waits for other ranks, and is therefore not called if this rank fails."""
    _collective_handlers.append(handler)
    atexit.register(handler)


def is_lost_peer(error: BaseException | None) -> bool:
    """Return whether an exception is Horovod's or torch.distributed's for another rank that has gone, or follows it."""
    while error is not None:
        error = cause_of(error)
        if type(error).__name__ in _LOST_PEER or _LOST_PEER_OF_GLOO in str(error):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def cause_of(error: BaseException) -> BaseException:
    """Return the error of this rank's own of which Horovod has made one of its own, or else the error itself.

    Horovod does so with each RuntimeError while it waits, also with that of a signal's handler, by which a loader tells
    that a worker was killed.
    """
    raised = error.__context__
    if type(error).__name__ == "HorovodInternalError" and isinstance(raised, RuntimeError):
        inner = _stack(raised.__traceback__)
        return cause_of(raised) if inner and "/horovod/" not in inner[0].path else error
    return error


def _await_signals(error: BaseException) -> BaseException:
    """Return the error of a signal's handler that comes with this one, or else this one.

    When a loader's worker is killed, its connections are reset before the loader's handler tells why.
    """
    try:
        select.select([], [], [], _LET_SIGNALS_COME_S)
    except Exception as raised:
        raised.__context__ = error
        error = raised
    with suppress(ValueError):  # in another thread, whose hook may call ours
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else its handler would end this hook
    return error


def _end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    shown = _await_signals(error)
    error, trace = cause_of(shown), shown.__traceback__ or trace
    kind, launch = type(error), _read_launch()
    if issubclass(kind, KeyboardInterrupt):
        report_failure("interrupted (SIGINT)", "", launch.rank)
        end_process("interrupted" if launch.rank == 0 else "", 130)
    lost_peer = launch.size > 1 and is_lost_peer(error)
    # An error of a backward pass on this rank alone has the same innermost line.
    collective = collective_of(_stack(trace)) if lost_peer else ""
    is_mistake = issubclass(kind, (ConfigError, DataError))
    cause = MISTAKE if is_mistake else LOST_PEER if lost_peer else kind.__name__
    was_in_collective = report_failure(cause, str(error), launch.rank, collective)
    if issubclass(kind, TrainerError):
        if launch.rank != 0:
            time.sleep(_LET_RANK_0_PRINT_FIRST_S)
        _end(launch, str(error), exit_codes.MISTAKE if is_mistake else 1)
    if lost_peer:
        time.sleep(_LET_PEER_PRINT_FIRST_S)
        _end(launch, f"lost another rank, and with it the job ({kind.__name__})", 1)
    _show(type(shown), shown, trace)
    if was_in_collective:
        time.sleep(_LET_WATCHER_EXPLAIN_S)
    what = str(error) or "no further message"  # as of a MemoryError
    _end(launch, f"{kind.__name__}: {what}", 1)


def _stack(trace: TracebackType | None) -> list[Frame]:
    """Return a traceback's calls, the innermost first. Reads no source, whose disk may be why this rank fails."""
    calls = [Frame(call.f_code.co_filename, line, call.f_code.co_name) for call, line in traceback.walk_tb(trace)]
    return calls[::-1]


def _read_launch() -> Launch:
    try:
        return read_launch()
    except ConfigError:  # which may be the very error: of nested launchers each has a rank 0
        with suppress(ConfigError):
            return max(launches(), key=lambda launch: launch.rank, default=Launch())
        return Launch()


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not _earlier_hooks:
        _print_line("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))
        return
    # Taken away first: a hook of torch.distributed's, or of the user's, may have been put around ours and call it.
    earlier = _earlier_hooks.pop()
    with suppress(Exception):
        earlier(kind, error, trace)


def _end(launch: Launch, message: str, code: int) -> None:
    end_process(name_rank(message, launch.rank, launch.size, socket.gethostname()), code)


def end_process(message: str, code: int) -> None:
    """End this process without the exit handlers that wait for other ranks, which Python would call."""
    # The reader of our output may be gone already; that must not keep this rank alive.
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    if message:
        _print_line(f"trainer: {message}")
    handlers = threading.Thread(target=_run_exit_handlers, daemon=True)
    with suppress(RuntimeError, KeyboardInterrupt):  # no thread can be started, or a second Ctrl-C
        handlers.start()
        handlers.join(_EXIT_S)
    os._exit(code)


def _print_line(text: str) -> None:
    # Not sys.stderr: torch.distributed wraps the hook and buffers what it prints.
    if sys.__stderr__ is not None:
        with suppress(OSError, ValueError):
            print_line(text, sys.__stderr__)


def _run_exit_handlers() -> None:
    """Call exit handlers as Python does at its end, without those that wait for other ranks."""
    horovod = sys.modules.get("horovod.torch.mpi_ops")
    for handler in (*_collective_handlers, *([horovod._basics.shutdown] if horovod else [])):
        atexit.unregister(handler)
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()  # what they have printed

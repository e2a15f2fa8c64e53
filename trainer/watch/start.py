"""Start of the watch, on each rank: its heartbeat, the handler that writes its stacks, and its host's watcher.

Nothing here may end a job: whatever fails is said once, and the job goes on without the watch. All ranks take part in
the broadcast all the same.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.cluster.environment import HANG_TIMEOUT
from trainer.cluster.network import host_id
from trainer.cluster.output import warn
from trainer.cluster.world import World
from trainer.errors import ConfigError
from trainer.watch.heartbeat import SIGNAL, close_record, note_end, open_record
from trainer.watch.recorder import Recorder, follow

_START_S = 1800.0
"""The limit until the first step: rank 0 may prepare the data, and the model is broadcast."""
_WATCHER = "trainer.ops.watcher"
"""The module that a watcher runs: a program, which the library does not import."""
_held: list[Any] = []  # the file of the stacks, and the watcher, for as long as this process runs


@dataclass(frozen=True)
class Entry:
    """What each rank tells all others of itself."""

    host: str
    """Its host's id and its namespace of processes: a container that has one of its own is another host."""
    record: str = ""
    """Where its host's watcher finds its heartbeat; "" where it cannot be watched."""
    problem: str = ""
    """Why it cannot be watched."""


def hang_timeout_s(given: float | None, environ: Any = os.environ) -> float | None:
    """Return the longest time without progress; None where it is to be measured, 0 where nothing is watched.

    Raises:
        ConfigError: TRAINER_HANG_TIMEOUT is not a number of seconds.
    """
    text = environ.get(HANG_TIMEOUT, "")
    if not text:
        return given
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{HANG_TIMEOUT} is {text!r}; valid is a number of seconds, or 0 to watch for no hangs")
    return seconds


def connection_limit_s(given: float | None, environ: Any = os.environ) -> float:
    """Return how long ranks may take to connect, which is the limit until the first step; 0 means for ever."""
    try:
        given = hang_timeout_s(given, environ)
    except ConfigError:  # which `start` says, and goes on
        given = None
    return 0.0 if given == 0 else max(given or 0.0, _START_S)


def describe(world: World) -> Entry | None:
    """Begin to note what this rank does, and return what the others have to know. Never fails.

    None means that nothing is to be watched: the job has one rank, or it has been joined before.
    """
    if world.size == 1:
        return None
    try:
        stacks = os.memfd_create("trainer-stacks")
        record = open_record(world.rank, stacks)
        if record is None:  # it has joined before
            os.close(stacks)
            return None
        _held.append(stacks)
        faulthandler.register(SIGNAL, file=stacks, all_threads=True, chain=False)
        atexit.register(note_end)
        namespace = Path("/proc/self/ns/pid").readlink()
        return Entry(f"{host_id()} {namespace}", str(record))
    except Exception as error:
        close_record()
        return Entry(f"{host_id()} ?", problem=f"{type(error).__name__}: {error}")


def start(
    world: World,
    entries: Sequence[Entry | None],
    given_s: float | None,
    broadcast: Callable[[Any], Any],
    recorder: Recorder | None,
) -> None:
    """Start the watcher of this host where this rank is its first. Collective, where rank 0 has an entry.

    Args:
        entries: of all ranks, in their order.
        given_s: rank 0's `hang_timeout_s`.
        broadcast: returns rank 0's value on all ranks.
        recorder: the flight recorder of this rank's collectives, where it is read.
    """
    known = [entry for entry in entries if entry is not None]
    if len(known) < len(entries):
        return
    here = known[world.rank]
    plan = broadcast(_plan(known, given_s) if world.is_root else None)
    try:
        if plan is None or not here.record:
            close_record()
            return
        if recorder is not None:
            follow(recorder, is_root=world.is_root)
        if next(entry for entry in known if entry.host == here.host and entry.record) is here:
            _launch({**plan, **_settings(known, here.host)})
    except Exception as error:
        warn(f"hangs are not watched for on {socket.gethostname()}: {type(error).__name__}: {error}")


def _plan(entries: Sequence[Entry], given_s: float | None) -> dict[str, Any] | None:
    """Return what rank 0 decides for the watchers of all hosts; None where nothing is watched."""
    try:
        given_s = hang_timeout_s(given_s)
    except ConfigError as error:
        warn(f"hangs are not watched for: {error}")
        return None
    if given_s == 0:
        return None
    if problem := next((entry.problem for entry in entries if entry.problem), ""):
        warn(f"hangs are not watched for on every rank: {problem}")
    return {"given_s": given_s, "start_s": connection_limit_s(given_s)}


def _settings(entries: Sequence[Entry], here: str) -> dict[str, Any]:
    """Return what the watcher of this host has to know beside the plan: see `main` of `trainer.ops.watcher`."""
    return {
        "host": here.split()[0],
        "size": len(entries),
        "records": {rank: entry.record for rank, entry in enumerate(entries) if entry.host == here and entry.record},
        "script": Path(sys.argv[0]).stem or "run",
    }


def _launch(settings: dict[str, Any]) -> None:
    library = str(Path(__file__).resolve().parent.parent.parent)
    paths = filter(None, [library, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    # In a session of its own, because Ctrl-C and Ctrl-Z are for the ranks. A signal that comes before the watcher
    # ignores it waits.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-S", "-m", _WATCHER],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _held.append(process)
    with suppress(BrokenPipeError):
        assert process.stdin is not None  # noqa: S101 (for the type checker)
        process.stdin.write(json.dumps(settings).encode())
        process.stdin.close()

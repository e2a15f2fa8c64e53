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
import secrets
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
from trainer.cluster.identity import token_of
from trainer.cluster.network import address_toward, host_id
from trainer.cluster.world import World
from trainer.errors import ConfigError
from trainer.watch.heartbeat import close_record, note_end, open_record
from trainer.watch.limits import START_S
from trainer.watch.probe import SIGNAL
from trainer.watch.ranks import own_address
from trainer.watch.recorder import Recorder, follow
from trainer.watch.report import warn
from trainer.watch.watcher import IGNORED
from trainer.watch.wire import serve

_held: list[Any] = []  # the file of the stacks, and the watcher, for as long as this process runs


@dataclass(frozen=True)
class Entry:
    """What the other ranks have to know of one."""

    host: str
    """Tells its host from all others; a container with processes of its own is one."""
    host_id: str
    part: str
    """This rank's random share of the watch token."""
    address: dict[str, int]
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
    """Return how long ranks may take to connect, as a job may until its first step; 0 for ever."""
    try:
        given = hang_timeout_s(given, environ)
    except ConfigError:  # which `start` says, and goes on
        given = None
    return 0.0 if given == 0 else max(given or 0.0, START_S)


def describe(world: World) -> Entry | None:
    """Begin to note what this rank does; return what the others have to know, or None where nothing is to be watched.

    Never fails.
    """
    if world.size == 1:
        return None
    try:
        heartbeat = open_record(world.rank)
        if heartbeat is None:  # it has joined before
            return None
        stacks = os.memfd_create("trainer-stacks")
        _held.append(stacks)
        faulthandler.register(SIGNAL, file=stacks, all_threads=True, chain=False)
        atexit.register(note_end)
        namespace = Path("/proc/self/ns/pid").readlink()
        address = own_address(world.rank, heartbeat, stacks).as_dict()
        return Entry(f"{host_id()} {namespace}", host_id(), secrets.token_hex(32), address)
    except Exception as error:
        close_record()
        return Entry(host_id(), host_id(), "", {}, f"{type(error).__name__}: {error}")


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
    entry_here = entries[world.rank]
    if entry_here is None or any(entry is None for entry in entries):
        return
    known = [entry for entry in entries if entry is not None]
    listener, plan = _plan(known, given_s) if world.is_root else (None, None)
    plan = broadcast(plan)
    try:
        if plan is None or not entry_here.address:
            close_record()
            return
        if recorder is not None:
            follow(recorder, is_root=world.is_root)
        if next(entry for entry in known if entry.host == entry_here.host and entry.address) is entry_here:
            _launch(_settings(known, entry_here, plan), listener)
    except Exception as error:
        warn(f"hangs are not watched for on {socket.gethostname()}: {type(error).__name__}: {error}")
    finally:
        if listener is not None:
            listener.close()


def _plan(entries: Sequence[Entry], given_s: float | None) -> tuple[socket.socket | None, dict[str, Any] | None]:
    """Return the hub's listener, and what all ranks have to know; no plan where nothing is watched."""
    try:
        given_s = hang_timeout_s(given_s)
        if given_s == 0:
            return None, None
        if problem := next((entry.problem for entry in entries if entry.problem), ""):
            warn(f"hangs are not watched for on every rank: {problem}")
        if not entries[0].address:
            return None, None
        plan: dict[str, Any] = {"given_s": given_s, "endpoint": ""}
        if len({entry.host for entry in entries}) == 1:
            return None, plan
        address = address_toward([entry.host_id for entry in entries])
        listener = serve(address)
        return listener, {**plan, "endpoint": f"{address}:{listener.getsockname()[1]}"}
    except ConfigError as error:
        warn(f"hangs are not watched for: {error}")
    except Exception as error:
        warn(f"hangs are not watched for: {type(error).__name__}: {error}")
    return None, None


def _settings(entries: Sequence[Entry], here: Entry, plan: dict[str, Any]) -> dict[str, Any]:
    ranks: dict[str, list[int]] = {}
    for rank, entry in enumerate(entries):
        ranks.setdefault(entry.host, []).append(rank)
    return {
        **plan,
        "hosts": [{"name": host.split()[0], "ranks": some} for host, some in ranks.items()],
        "host": list(ranks).index(here.host),
        "addresses": {rank: entries[rank].address for rank in ranks[here.host] if entries[rank].address},
        "token": token_of(["watch", *(entry.part for entry in entries)]),
        "script": Path(sys.argv[0]).stem or "run",
    }


def _launch(settings: dict[str, Any], listener: socket.socket | None) -> None:
    number = listener.fileno() if listener is not None else -1
    library = str(Path(__file__).resolve().parent.parent.parent)
    paths = [library, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    # In a session of its own, because Ctrl-C and Ctrl-Z are for the ranks. What comes before it ignores signals waits.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-S", "-m", "trainer.watch.watcher"], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, start_new_session=True, pass_fds=[number] if number >= 0 else [],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    _held.append(process)
    with suppress(BrokenPipeError):
        assert process.stdin is not None  # noqa: S101 (for the type checker)
        process.stdin.write(json.dumps({**settings, "listener": number}).encode())
        process.stdin.close()

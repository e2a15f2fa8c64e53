"""Start of the watch, on each rank: its heartbeat, the handler that writes its stacks, and its host's watcher.

Nothing here may end a job: whatever fails is said once, and the job goes on without the watch.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.cluster.environment import HANG_TIMEOUT
from trainer.cluster.network import namespace_id
from trainer.cluster.output import warn
from trainer.cluster.world import World
from trainer.errors import ConfigError
from trainer.watch.heartbeat import open_record
from trainer.watch.recorder import Recorder, follow

_START_S = 1800.0
"""The limit until the first step: rank 0 may prepare the data, and the model is broadcast."""
_WATCHER = "trainer.ops.watcher"
"""The module that a watcher runs: a program, which the library does not import."""


@dataclass(frozen=True)
class Entry:
    """What each rank tells all others of itself."""

    given_s: float | None
    """The longest time without progress; rank 0's holds for the job."""
    host: str = ""
    """Its host's id, by `namespace_id`."""
    record: str = ""
    """Where its host's watcher finds its heartbeat; "" where it cannot be watched."""


def hang_timeout_s(given: float | None, environ: Any = os.environ) -> float | None:
    """Return the longest time without progress; None where it is not set, 0 where nothing is watched.

    Raises:
        ConfigError: TRAINER_HANG_TIMEOUT is not a number of seconds.
    """
    text = environ.get(HANG_TIMEOUT, "")
    try:
        seconds = float(text) if text else given
    except ValueError:
        seconds = math.nan
    if seconds is not None and not 0 <= seconds < math.inf:
        raise ConfigError(f"{HANG_TIMEOUT} is {text!r}; valid is a number of seconds, or 0 to watch for no hangs")
    return seconds


def start_limit_s(given_s: float | None) -> float:
    """Return the limit until the first step, within which ranks have to connect; 0 means for ever."""
    return 0.0 if given_s == 0 else max(given_s or 0.0, _START_S)


def describe(world: World, given_s: float | None) -> Entry | None:
    """Begin to note what this rank does, and return what the others have to know. Never fails.

    None means that nothing is to be watched: the job has one rank, or it has been joined before.

    Args:
        given_s: as `hang_timeout_s` returns it.
    """
    if world.size == 1:
        return None
    try:
        record = open_record(world.rank)
        return None if record is None else Entry(given_s, namespace_id(), str(record))
    except Exception as error:
        warn(f"hangs are not watched for on rank {world.rank}: {type(error).__name__}: {error}")
        return Entry(given_s)


def start(world: World, entries: Sequence[Entry | None], recorder: Recorder | None) -> None:
    """Start the watcher of this host where this rank is its first. Never fails.

    Args:
        entries: of all ranks, in their order.
        recorder: the flight recorder of this rank's collectives, where it is read.
    """
    known = [entry for entry in entries if entry is not None]
    if len(known) < len(entries) or known[0].given_s == 0:
        return
    here, given_s = known[world.rank], known[0].given_s
    records = {rank: entry.record for rank, entry in enumerate(known) if entry.record and entry.host == here.host}
    try:
        if here.record and recorder is not None:
            follow(recorder, is_root=world.is_root)
        if here.record and min(records) == world.rank:
            settings = {"host": socket.gethostname(), "size": len(known), "given_s": given_s, "records": records}
            settings |= {"start_s": start_limit_s(given_s), "script": Path(sys.argv[0]).stem or "run"}
            threading.Thread(target=_keep, args=(_launch(settings), settings), daemon=True).start()
    except Exception as error:
        warn(f"hangs are not watched for on {socket.gethostname()}: {type(error).__name__}: {error}")


def _keep(watcher: subprocess.Popen[bytes], settings: dict[str, Any]) -> None:
    """Start another watcher where one was killed: else nobody would notice that the watch has gone."""
    while watcher.wait() < 0:
        threading.Event().wait(1.0)  # by then a job that is being killed is gone
        warn(f"the watcher on {socket.gethostname()} was killed; another one is started")
        watcher = _launch(settings)


def _launch(settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    library = str(Path(__file__).resolve().parent.parent.parent)
    paths = filter(None, [library, os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-P", "-S", "-m", _WATCHER, json.dumps(settings)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # because Ctrl-C and Ctrl-Z are for the ranks
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )

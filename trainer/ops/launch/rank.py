"""What each rank runs: it reads the function, calls it, and writes how the call ended.

python -m trainer.ops.launch.rank FOLDER
"""

from __future__ import annotations

import hashlib
import linecache
import os
import pickle
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from trainer.cluster.environment import SECRET, Launch, read_launch
from trainer.cluster.launchers import LAUNCHERS
from trainer.cluster.output import write_whole_lines
from trainer.errors import LaunchError, TrainerError
from trainer.ops.launch.outcome import CALL, Outcome, dumps
from trainer.ops.launch.output import tag_output
from trainer.watch.failure import cause_of, is_lost_peer, report_failures


def main() -> None:
    """Call the function as this rank of the job."""
    folder, launch = Path(sys.argv[1]), read_launch()
    if not LAUNCHERS[launch.launcher].marks_output:
        tag_output(launch.rank)
    write_whole_lines()
    report_failures()
    try:
        value = _call(folder / CALL)
        try:
            result = dumps(value)
        except Exception as error:  # whatever the value's own code raises
            text = f"trainer.launch cannot send back the result of rank {launch.rank}: {error}"
            raise TrainerError(text) from None
    except Exception as error:
        _write(folder, launch, _pickle_error(error), _trace(error), is_lost_peer(error) and launch.size > 1)
        raise
    _write(folder, launch, result)


def _call(file: Path) -> Any:
    with file.open("rb") as call:
        sys.argv, sources, load = pickle.load(call)  # noqa: S301 (the caller has written it, into a folder of this user's)
        linecache.cache.update(sources)
        function, args, kwargs = pickle.loads(load)  # noqa: S301 (as above)
    try:
        return function(*args, **kwargs)
    except SystemExit as ending:
        if ending.code not in (None, 0):
            raise LaunchError(f"the function has called sys.exit({ending.code!r})") from None
        return None


def _pickle_error(error: Exception) -> bytes:
    try:
        return dumps(cause_of(error))
    except Exception:  # it holds what cannot be sent; its traceback says enough
        return b""


def _trace(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _write(folder: Path, launch: Launch, value: bytes, trace: str = "", follows: bool = False) -> None:
    # Every start of the job has a secret of its own.
    attempt = hashlib.sha256(os.environ.get(SECRET, "").encode()).hexdigest()
    host, now = socket.gethostname(), time.time()
    outcome = Outcome(launch.rank, launch.size, host, attempt, now, value, trace, follows)
    partial = folder / f".outcome-{launch.rank}"  # in a folder of this user's alone
    partial.write_bytes(pickle.dumps(outcome))
    partial.replace(folder / f"outcome-{launch.rank}")


if __name__ == "__main__":
    main()

"""Lock: one job at a time uses a folder of checkpoints, and one of its ranks writes there."""

from __future__ import annotations

import io
import json
import os
import socket
import time
from pathlib import Path

from trainer.errors import TrainerError
from trainer.untrusted import lock_own, read_dict

_NAME = ".lock"
_FORMER_JOB_ENDS_S = 10.0
_POLL_S = 0.1


def lock_folder(folder: Path, job: str) -> io.FileIO | None:
    """Lock a folder, which is made where it is missing, until the returned file is closed or the process ends.

    The file names the job, so that ranks on several hosts tell that they share the folder, also where a mount keeps
    locks to each host. A rank or a worker process of the former job may be about to end, so this waits a little.

    Args:
        job: the same for all ranks of a job.

    Returns:
        None if another rank of this job has locked the folder.

    Raises:
        TrainerError: the folder cannot be written, or another job uses it.
    """
    path, deadline = folder / _NAME, time.monotonic() + _FORMER_JOB_ENDS_S
    text = json.dumps({"job": job, "process": os.getpid(), "host": socket.gethostname()})
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            holder = read_dict(path)
            if holder.get("job") == job:
                return None
            if (lock := lock_own(path, text)) is not None:
                return lock
        except OSError as error:
            reason = error.strerror or error
            raise TrainerError(f"the checkpoints' folder {folder} cannot be written: {reason}") from None
        if time.monotonic() > deadline:
            who = f"process {holder.get('process', '?')} on host {holder.get('host', '?')}"
            if holder.get("process") == os.getpid():
                who = "an earlier run of this script, which was not closed"
            raise TrainerError(f"the checkpoints' folder {folder} is in use by {who}; name another folder")
        time.sleep(_POLL_S)

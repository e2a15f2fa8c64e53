"""The folder of a job under `trainer run`: its ranks' heartbeats, and in `verdict.json` why the watch has ended it.

Beside the heartbeat `rank-3` lies `sigterm-3`, which is empty until that rank has got SIGTERM.

It lies among the temporary files of each host. `trainer run` makes it before it starts the ranks, so that no other user
does, and reads it after they are gone.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from trainer.cluster.network import namespace_id

JOB = "TRAINER_JOB"
"""Environment variable with the job's random id; also the mark by which the job's processes are found."""
SIGTERM = "sigterm"


def folder_name(job: str, user: int) -> str:
    """Return the name of a job's folder on this host: hosts may share the folder for temporary files."""
    return f"trainer-{user}-{job}-{namespace_id()}"


def job_folder() -> Path | None:
    """Return the folder of the job that this process belongs to, which may not be there; None without a job."""
    job = os.environ.get(JOB)
    return Path(tempfile.gettempdir(), folder_name(job, os.geteuid())) if job else None


def is_ours(folder: Path) -> bool:
    """Return whether a folder is there and this user's, not one that another user has put in its place."""
    with suppress(OSError):
        status = folder.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return False

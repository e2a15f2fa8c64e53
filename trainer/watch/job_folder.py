"""The folder of a job under `trainer run`: its ranks' heartbeats, and in `verdict.json` why the watch has ended it.

Beside the heartbeat `rank-3` lies `sigterm-3`, which is empty until that rank has got SIGTERM.

It lies among the temporary files of each host. `trainer run` makes it before it starts the ranks, so that no other user
does, and reads it after they are gone.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.cluster.network import namespace_id
from trainer.files import write_atomically
from trainer.untrusted import parse_json

JOB = "TRAINER_JOB"
"""Environment variable with the job's random id; also the mark by which the job's processes are found."""
HANG, DIFFERENT, WAITS = "hang", "different collectives", "waits"
"""Kinds of verdict: the host's ranks are ended because the job hangs; it has failed because ranks called different
collectives; all ranks of the host wait, and nothing is ended yet."""
VERDICT, SIGTERM = "verdict.json", "sigterm"


@dataclass(frozen=True)
class JobVerdict:
    """What a host's watcher has found out about the job."""

    kind: str
    text: str
    """If all ranks of one of several hosts wait, for what; else a sentence."""
    culprits: tuple[int, ...] = ()
    """Ranks that are to blame."""


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


def write_verdict(verdict: JobVerdict | None) -> None:
    """Note what was found out about the job where `trainer run` finds it, as one line of JSON; None takes it back."""
    folder = job_folder()
    if folder is not None and is_ours(folder):
        with suppress(OSError):
            if verdict is None:
                (folder / VERDICT).unlink(missing_ok=True)
            else:
                write_atomically(folder / VERDICT, json.dumps(asdict(verdict)) + "\n")


def parse_verdict(line: str | bytes) -> JobVerdict | None:
    """Return what `write_verdict` has noted; None for anything else."""
    with suppress(ValueError, LookupError, TypeError, OverflowError):
        entry = parse_json(line)
        return JobVerdict(str(entry["kind"]), str(entry["text"]), tuple(map(int, entry["culprits"])))
    return None

"""Lock: one job at a time writes checkpoints into a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

from trainer.files import what_is_no_folder
from trainer.untrusted import open_no_link, parse_json, read_file

_NAME = ".lock"
# File systems without locks: some network file systems, and some in user space.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_FORMER_JOB_ENDS_S = 10.0
_POLL_S = 0.1


class FolderLock:
    """A lock on a folder, which the kernel gives up when the process ends.

    Args:
        folder: made where it is missing.
        job: the same for all ranks of a job. So they tell whether a folder that is locked is one they share.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self._path, self._job = folder / _NAME, job
        self._descriptor = -1
        self.is_held = False
        """Whether this process is the one that writes into the folder."""

    def acquire(self) -> str:
        """Take the lock, unless another rank of this job has it; return what keeps this job from it, or "".

        A rank of the former job may be on its way out, and a worker process of it, so this waits a little.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = open_no_link(self._path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            reason = what_is_no_folder(self._path.parent) or error.strerror or error
            return f"the checkpoints' folder {self._path.parent} cannot be written: {reason}"
        deadline = time.monotonic() + _FORMER_JOB_ENDS_S
        while not self._try():
            holder = self._holder()
            if holder.get("job") == self._job:
                return ""
            if time.monotonic() > deadline:
                who = f"process {holder.get('process', '?')} on host {holder.get('host', '?')}"
                if holder.get("process") == os.getpid():
                    who = "an earlier run of this script, which was not closed"
                return f"the checkpoints' folder {self._path.parent} is in use by {who}; name another folder"
            time.sleep(_POLL_S)
        self.is_held = True
        return ""

    def signal_holder(self, number: signal.Signals) -> None:
        """Send a signal to the process that has the lock, where it is a rank of this job on this host."""
        holder = self._holder()
        process = holder.get("process")
        # Others may be able to write the file, and may not have this user's other processes signalled.
        if holder.get("job") == self._job and holder.get("host") == socket.gethostname() and self._is_open_in(process):
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def _is_open_in(self, process: object) -> TypeGuard[int]:
        if type(process) is not int or process <= 0:
            return False
        with suppress(OSError):
            return any(self._path.samefile(entry) for entry in _open_files(process))
        return False

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self.is_held = -1, False

    def _try(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS or self._holder().get("job") == self._job:
                return False
        # Some mounts of a shared folder keep locks to each host. Another host of this job has written its name, then.
        former = self._holder()
        if former.get("job") == self._job and former.get("host") != socket.gethostname():
            return False
        holder = {"job": self._job, "process": os.getpid(), "host": socket.gethostname()}
        with suppress(OSError):  # on a full disk the lock holds without its text
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)
            os.fsync(self._descriptor)
        return True

    def _holder(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            holder = parse_json(read_file(self._path))
            return holder if isinstance(holder, dict) else {}
        return {}


def _open_files(process: int) -> Iterator[Path]:
    for path in Path(f"/proc/{process}/fd").iterdir():
        if path.is_file():  # else it is a socket, or was closed in the meantime
            yield path

"""The status file of a rank: how far it is, kept where `trainer run` finds it after the rank was killed.

Without TRAINER_JOB in the environment, every function here does nothing. The file is mapped into memory, so that what
was reported last is there whichever way the rank ends. It lies in a folder of the job's own, `folder_name`, among the
temporary files. Its size is fixed: a line of text that a shell can read too (mark, process, rank, world size, host),
then the counters, texts, and a signal.
"""

from __future__ import annotations

import atexit
import mmap
import os
import socket
import stat
import struct
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.watch import marks

JOB = "TRAINER_JOB"
"""Environment variable with the job's random id; also the mark by which the job's processes are found."""
PREEMPTED, DONE = "preempted", "done"
"""Phases of a rank that has ended its work: to be started again, or not."""
MISTAKE, LOST_PEER, HANG, DIFFERENT = "mistake", "lost peer", "hang", "different collectives"
"""Kinds of error beside the names of exceptions: a user's mistake; a failure that follows from another rank's; a hang;
ranks that had called different collectives.

The message of a hang begins with the ranks that are to blame, as in "1,3: …".
"""
SIZE = 1024
"""Bytes of a status file."""
_MARK = b"trainer-status"
_HEAD = struct.Struct("192s")
_COUNTERS = struct.Struct("<qdqqd")  # update, time of the last progress, reports since; the first update and its time
_PROGRESS, _PHASE, _FIRST = struct.Struct("<qdq"), struct.Struct("<dq"), struct.Struct("<qd")
_TEXTS = struct.Struct("16s80s512s")  # phase, kind of error, message
_AT_COUNTERS, _AT_FIRST, _AT_TEXTS = _HEAD.size, _HEAD.size + _PROGRESS.size, _HEAD.size + _COUNTERS.size
_AT_SIGNAL = _AT_TEXTS + _TEXTS.size

_file: mmap.mmap | None = None
_reports = 0


class Place(Protocol):
    """Which rank this process is. `World` and `Launch` say so."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """What a rank has reported."""

    pid: int
    rank: int
    size: int
    host: str
    update: int = 0
    """Updates that were completed."""
    progress_s: float = 0.0
    """When it reported last, by the monotonic clock of its host."""
    reports: int = 0
    """Batches and phases since its last update: of two ranks in the same update, the one with fewer is behind."""
    first_update: int = 0
    """The first update that it completed after its start; 0 before."""
    first_update_s: float = 0.0
    """When that was, by the same clock."""
    signal: int = 0
    """The signal that has asked it to save and end; 0 without one."""
    phase: str = ""
    error: str = ""
    """One of these kinds, or the class name of the exception with which it failed; empty without one."""
    message: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether it has reported an end, in good order or with an error."""
        return bool(self.error) or self.phase in (PREEMPTED, DONE)


def folder_name(job: str, user: int) -> str:
    """Return the name of the folder of a job's status files."""
    return f"trainer-{user}-{job}"


def is_own(folder: Path) -> bool:
    """Return whether a folder is there and this user's, not one that another user has put in its place."""
    with suppress(OSError):
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return False


def report_join(place: Place) -> None:
    """Make the status file of this rank, which is about to join the others."""
    global _file
    folder = _own_folder()
    if folder is None or _file is not None:
        return
    with suppress(OSError):  # a full disk ends no training that does not need the disk
        folder.mkdir(mode=0o700, exist_ok=True)
        if is_own(folder):
            _file = _make(folder / f"rank-{place.rank}", place)
            report_phase("joining")
            atexit.register(_report_exit)


def _make(path: Path, place: Place) -> mmap.mmap:
    # One that is there belongs to the rank: this process is a child of it that has inherited its environment.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
    try:
        os.posix_fallocate(descriptor, 0, SIZE)  # a page without space would end this process with SIGBUS
        file = mmap.mmap(descriptor, SIZE)
    finally:
        os.close(descriptor)
    head = b"%s %d %d %d %s\n" % (_MARK, os.getpid(), place.rank, place.size, socket.gethostname().encode())
    _HEAD.pack_into(file, 0, head)
    return file


def report_update(update: int) -> None:
    """Note the number of updates that this rank has completed. Takes less than a microsecond."""
    global _reports
    marks.note_update(update)
    if _file is not None:
        now, _reports = time.monotonic(), 0
        _PROGRESS.pack_into(_file, _AT_COUNTERS, update, now, 0)
        if not any(_file[_AT_FIRST : _AT_FIRST + 8]):
            _FIRST.pack_into(_file, _AT_FIRST, update, now)


class UpdateCounter:
    """Counts the updates of a run, and reports each."""

    def __init__(self) -> None:
        self.count = 0
        """Completed updates. A run that goes on from a checkpoint sets it to the checkpoint's."""
        self._is_counted = False

    def on_batch(self) -> None:
        """Note that a loader yields a batch."""
        self._is_counted = False
        report_phase("training")

    def on_step(self, has_loader: bool) -> None:
        """Note a step of an optimizer. Those of several optimizers on a loader's batch are one update."""
        marks.note_step()
        if not has_loader:
            report_phase("training")  # no batch says so: a checkpoint's phase would never end
        if not (has_loader and self._is_counted):
            self.count += 1
            self._is_counted = True
            report_update(self.count)


def report_phase(phase: str) -> None:
    """Note what this rank does now: "training", "evaluation", "saving", … Counts as progress."""
    global _reports
    marks.note_phase(phase)
    if _file is not None:
        _reports += 1
        struct.pack_into("16s", _file, _AT_TEXTS, phase.encode()[:16])
        _PHASE.pack_into(_file, _AT_COUNTERS + 8, time.monotonic(), _reports)


def report_signal(number: int) -> None:
    """Note that this rank was asked to end. One that died without it was not ended by the launcher."""
    if _file is not None:
        _file[_AT_SIGNAL] = number


def report_failure(kind: str, message: str, place: Place) -> None:
    """Note with which error this rank ends. It may not have joined yet."""
    if _file is None:
        report_join(place)
    if _file is not None:
        phase, before = _TEXTS.unpack_from(_file, _AT_TEXTS)[:2]
        if before.rstrip(b"\0").decode() in (HANG, DIFFERENT):
            return  # which is why this rank fails
        _TEXTS.pack_into(_file, _AT_TEXTS, phase, kind.encode()[:80], message.encode()[:512])


def report_verdict(rank: int, kind: str, message: str) -> None:
    """Note in the file of another process, a rank of this host, what has been found out about the job.

    Args:
        kind: HANG: the job is ended because of it; or DIFFERENT, which leaves a rank's own error where it has one.
    """
    folder = _own_folder()
    if folder is None or not is_own(folder):
        return
    with suppress(OSError), (folder / f"rank-{rank}").open("r+b") as file:
        status = read_status(file.read(SIZE))
        if status is not None and (kind == HANG or status.error in ("", LOST_PEER)):
            file.seek(_AT_TEXTS + 16)
            file.write(struct.pack("80s512s", kind.encode(), message.encode()[:512]))


def _own_folder() -> Path | None:
    """Return the folder of this job's status files; None without a job."""
    job = os.environ.get(JOB)
    return Path(tempfile.gettempdir(), folder_name(job, os.geteuid())) if job else None


def report_end(how: str) -> None:
    """Note that this rank has ended its work: "preempted", to be started again, or "done"."""
    report_phase(how)


def _report_exit() -> None:
    # Python ends in good order, which it also does after sys.exit: the launcher's exit code tells more.
    if _file is not None and not _file[_AT_TEXTS:].startswith(PREEMPTED.encode()):
        report_end(DONE)


def read_status(record: bytes) -> RankStatus | None:
    """Return what is in a status file; None for anything else, and for one that is being made."""
    if len(record) != SIZE or not record.startswith(_MARK):
        return None
    _, pid, rank, size, host = record[: _HEAD.size].split(b"\n")[0].split(b" ", 4)
    update, progress_s, reports, first_update, first_update_s = _COUNTERS.unpack_from(record, _AT_COUNTERS)
    texts = _TEXTS.unpack_from(record, _AT_TEXTS)
    phase, error, message = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
    return RankStatus(
        pid=int(pid), rank=int(rank), size=int(size), host=host.decode(), update=update, progress_s=progress_s,
        reports=reports, first_update=first_update, first_update_s=first_update_s, phase=phase, error=error,
        message=message, signal=record[_AT_SIGNAL],
    )  # fmt: skip

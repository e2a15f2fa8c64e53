"""Files where others can write, of which nothing is known before they are read or opened, JSON in them, and locks."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

_MOST_BYTES = 64 << 20


def parse_json(data: str | bytes) -> Any:
    """Return what JSON says.

    Raises:
        ValueError: it is none, or is nested too deeply.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def open_file(path: Path) -> BinaryIO:
    """Open a file to be read, without a buffer. A pipe or a device in its place is not waited for.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    return os.fdopen(_open_regular(path, os.O_RDONLY), "rb", buffering=0)


def open_own(path: Path, mode: str) -> io.FileIO:
    """Open a file to be changed, without a buffer. A link that somebody has put in its place is refused.

    Raises:
        OSError: it cannot be opened, or is a link or no regular file. Its folder may be a link.
    """
    return io.FileIO(path, mode, opener=open_no_link)


def lock_own(path: Path, holder: str) -> io.FileIO | None:
    """Lock a file that is opened as by `open_own`, and write into it who has it; return None if another process has.

    The lock holds until the returned file is closed or the process ends. A file system without locks keeps nobody out.

    Raises:
        OSError: as for `open_own`.
    """
    file = open_own(path, "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):  # else the file system has no locks
            file.close()
            return None
    with suppress(OSError):  # on a full disk the lock holds without its text
        file.truncate(0)
        file.write(holder.encode())
        os.fsync(file)
    return file


def open_no_link(path: Path | str, flags: int) -> int:
    """Return the descriptor of a file that is opened as by `open_own`."""
    try:
        return _open_regular(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        raise OSError(error.errno, "it is a link") if error.errno == errno.ELOOP else error from None


def _open_regular(path: Path | str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, os.strerror(number) if number == errno.EISDIR else "it is no regular file")
    return descriptor


def read_file(path: Path, most_bytes: int = _MOST_BYTES) -> bytes:
    """Return what is in a file, which may say that it has a terabyte.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than `most_bytes`.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes; valid are up to {most_bytes:,}")
        return file.read(most_bytes)


def read_dict(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one where the file cannot be read, or holds something else."""
    with suppress(OSError, ValueError):
        content = parse_json(read_file(path))
        return content if isinstance(content, dict) else {}
    return {}

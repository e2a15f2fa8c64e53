"""What others may have written: JSON and files of which nothing is known before they are read."""

from __future__ import annotations

import errno
import json
import os
import stat
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
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, os.strerror(number) if number == errno.EISDIR else "it is no regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


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

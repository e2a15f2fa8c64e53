"""Files and folders that are on the disk once a call has returned, and the hash of what was meant to be in them."""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from trainer.watch.heartbeat import progress

# Gathers the small writes of a format's headers. A larger write goes past the buffer, uncopied and in one call.
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What a file holds: its size in bytes, and the SHA-256 of its content in hexadecimal digits."""

    size: int
    sha256: str


class _HashingFile(io.RawIOBase):
    """Writes to a file descriptor and hashes what it was given.

    It has no `fileno`, through which a writer could reach the file without its bytes being hashed.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._hash = hashlib.sha256()
        self._size = 0
        self.error: OSError | None = None
        """The first error. `torch.save` reports another one in its place."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.error:
            raise self.error  # what follows a gap must not be written
        view = memoryview(data)
        try:
            written = os.write(self._descriptor, view)
            if view.nbytes and not written:
                raise OSError(errno.EIO, "the file system takes no more bytes")
        except OSError as error:
            self.error = error
            raise
        self._hash.update(view[:written])
        self._size += written
        progress()
        return written

    def entry(self) -> FileEntry:
        return FileEntry(size=self._size, sha256=self._hash.hexdigest())

    def let_go(self) -> None:
        """Never write again: the descriptor's number may soon be another file's."""
        self.error = self.error or OSError(errno.EBADF, os.strerror(errno.EBADF))


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> FileEntry:
    """Create a file with what `write` writes to the stream that it is given, and return once that is on the disk.

    The stream cannot seek. It completes short writes and, for large buffers, writes and hashes without the GIL.

    Raises:
        OSError: the file cannot be written; `filename` is set.
        Exception: whatever else `write` raises.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    raw = _HashingFile(descriptor)
    stream = io.BufferedWriter(raw, _BUFFER_BYTES)
    try:
        try:
            write(cast("BinaryIO", stream))
            stream.close()
            os.fsync(descriptor)
            _check_size(descriptor, raw.entry())
        finally:
            # The descriptor is open still: closing the stream closes a `_HashingFile`, which does not own it.
            error = raw.error
            raw.let_go()
            with suppress(OSError):
                stream.close()
            os.close(descriptor)
            if error:
                raise error
    except OSError as failure:
        failure.filename = failure.filename or str(path)
        raise
    return raw.entry()


def _check_size(descriptor: int, entry: FileEntry) -> None:
    size = os.fstat(descriptor).st_size
    if size != entry.size:
        raise OSError(errno.EIO, f"it has {size:,} bytes after {entry.size:,} were written")


def sync_folder(folder: Path) -> None:
    """Write a folder's list of names to the disk, and return once it is there, or raise `OSError` with a `filename`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder, and write its names through.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            error.filename = str(folder)
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, and return once they are on the disk; raise `OSError` if they cannot be made."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)

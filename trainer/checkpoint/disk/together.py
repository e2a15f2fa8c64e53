"""Files of one checkpoint that several ranks write: how they reach the rank that commits it.

All of these ranks see one folder. The rank that commits makes the checkpoint's hidden folder in it. There each other
rank writes a file, and gives it a name with its size and hash once it is on the disk. The first one waits for these
names. Ranks exchange nothing else, so this works beside the training, and where no collective is possible. A rank that
cannot write its file takes the hidden folder away, which works on a full disk, too.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from trainer.checkpoint.disk.durable import FileEntry, write_file
from trainer.errors import TrainerError

_ANNOUNCED = re.compile(r"(?P<file>.+)\.(?P<size>\d+)\.(?P<sha256>[0-9a-f]{64})")
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.005, 0.25


class OthersFailedError(TrainerError):
    """A checkpoint was not written because of another rank, which has the reason."""


@contextmanager
def stops_with_others() -> Iterator[None]:
    """Raise `OthersFailedError` where another rank has taken the folder away that this one writes into."""
    try:
        yield
    except FileNotFoundError:
        raise OthersFailedError("another rank could not write its part") from None


def announce(place: Path, file: str, write: Callable[[BinaryIO], object], appears_within_s: float) -> None:
    """Write a file into the hidden folder that another rank makes, for its `collect`.

    Args:
        place: the hidden folder.
        appears_within_s: 0 where it is there by now.

    Raises:
        OthersFailedError: the folder is not there, or goes away.
        OSError: the file cannot be written; `filename` is set.
        Exception: whatever else `write` raises.
    """
    for waited_s in _naps():
        # Listing the folder around it asks a network file system's server; its clients remember what is not there.
        if waited_s >= appears_within_s or (place.parent.is_dir() and place in place.parent.iterdir()):
            break
    with stops_with_others():
        entry = write_file(place / f"{file}.partial", write)
        (place / f"{file}.partial").rename(place / f"{file}.{entry.size}.{entry.sha256}")


def collect(place: Path, files: Collection[str], timeout_s: float) -> dict[str, FileEntry]:
    """Return the entries of files that other ranks announce, under their own names in the folder.

    Args:
        timeout_s: without a new byte in the folder.

    Raises:
        OthersFailedError: a rank has taken the folder away, or nothing more comes.
        OSError: the folder cannot be read.
    """
    entries: dict[str, FileEntry] = {}
    bytes_before, since_s = -1, 0.0
    for waited_s in _naps():
        try:
            listed = list(place.iterdir())
            bytes_now = sum(path.stat().st_size for path in listed)
        except FileNotFoundError:
            if place.exists():
                continue  # a file was renamed between the two calls
            raise OthersFailedError("another rank could not write its part") from None
        for path in listed:
            if (match := _ANNOUNCED.fullmatch(path.name)) and match["file"] in files:
                path.rename(place / match["file"])
                entries[match["file"]] = FileEntry(size=int(match["size"]), sha256=match["sha256"])
        if len(entries) == len(files):
            return entries
        if bytes_now != bytes_before:
            bytes_before, since_s = bytes_now, waited_s
        elif waited_s - since_s > timeout_s:
            missing = ", ".join(sorted(set(files) - set(entries)))
            raise OthersFailedError(f"other ranks have not written {missing} within {timeout_s:g} s")
    raise AssertionError  # naps do not end


def _naps() -> Iterator[float]:
    """Yield the seconds since the first call, with longer and longer naps between."""
    started, nap = time.monotonic(), _SHORTEST_NAP_S
    while True:
        yield time.monotonic() - started
        time.sleep(nap)
        nap = min(nap * 1.5, _LONGEST_NAP_S)

"""Checkpoints on disk: a checkpoint is a folder that is committed, or it is not there.

A checkpoint is written into a hidden folder beside its place: the files first, then a manifest with their sizes and
hashes. When all of it is on the disk, the folder is renamed, so no reader sees half a checkpoint. The newest valid
checkpoint is found by looking at what is there. A folder of checkpoints has one writer at a time, and any number of
readers. What the files hold is not known here.

In a sharded commit, several ranks that see one folder write the files of one checkpoint. The rank that commits makes
the hidden folder. There each other rank writes a file, and gives it a name with its size and hash once it is on the
disk. The first one waits for these names. Ranks exchange nothing else, so this works beside the training, and where no
collective is possible. A rank that cannot write its file takes the hidden folder away, which works on a full disk, too.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

from trainer.checkpoint.disk.committed import MANIFEST, Committed, Manifest, check_file_names, find, load, order_of
from trainer.checkpoint.disk.durable import FileEntry, make_folder, sync_folder, write_file
from trainer.errors import DataError, TrainerError

# A rank that writes waits for others as long as nothing new comes from them.
TIMEOUT_S = 600.0
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<state>partial|removed)")
_ANNOUNCED = re.compile(r"(?P<file>.+)\.(?P<size>\d+)\.(?P<sha256>[0-9a-f]{64})")
_POLL_S = 0.05


class OthersFailedError(TrainerError):
    """A checkpoint was not written because of another rank, which has the reason."""


def commit(
    folder: Path,
    name: str,
    files: Mapping[str, Callable[[BinaryIO], object]],
    facts: Mapping[str, Any],
    check: Callable[[Path], object] | None = None,
    *,
    others: Collection[str] = (),
) -> Committed:
    """Write a checkpoint and return once it is committed. Other checkpoints are left as they are.

    Args:
        name: from `name_of`.
        files: by file name, what writes the file to the stream that it is given.
        facts: anything that JSON can hold.
        check: is called with the folder that the files are in before they are committed, and raises if they are bad.
        others: files that other ranks `contribute`, once `begin` was called for the checkpoint.

    Raises:
        TrainerError: it cannot be written, or is there already. Nothing of it is left, as far as that can be removed.
        OthersFailedError: another rank could not write its file.
        Exception: whatever else `files` and `check` raise, with the same effect.
    """
    check_file_names(files)
    if order_of(name) is None:
        raise ValueError(f"{name!r} is no name of a checkpoint; `name_of` makes one")
    final, place = folder / name, _hidden(folder, name)
    try:
        with _told(f"checkpoint {final} cannot be written"):
            if not others:
                begin(folder, name)
            with _stops_with_others() if others else nullcontext():
                entries = {file: write_file(place / file, write) for file, write in files.items()}
                entries |= _collect(place, frozenset(others))
            if check:
                check(place)
            data = Manifest(name=name, facts=facts, files=entries).to_bytes()
            write_file(place / MANIFEST, lambda file: file.write(data))
            sync_folder(place)
            if final.exists():
                _hide(final)
            place.rename(final)
            try:
                sync_folder(folder)
            except OSError:
                final.rename(place)  # whoever is told that it failed must not find it later
                raise
    except BaseException:
        with suppress(OSError):
            _delete(place)
        raise
    return Committed(path=final, **vars(Manifest.from_bytes(data)))


def contribute(folder: Path, name: str, file: str, write: Callable[[BinaryIO], object]) -> None:
    """Write one of the `others` of a checkpoint that another rank has begun, and return once it is on the disk.

    Raises:
        TrainerError: it cannot be written; then nothing of the checkpoint is left.
        OthersFailedError: another rank gives up.
        Exception: whatever else `write` raises.
    """
    place, removed = _hidden(folder, name), _hidden(folder, name, "removed")
    try:
        with _told(f"checkpoint {folder / name} cannot be written"), _stops_with_others():
            entry = write_file(place / f"{file}.partial", write)
            (place / f"{file}.partial").rename(place / f"{file}.{entry.size}.{entry.sha256}")
    except BaseException as error:
        if not isinstance(error, OthersFailedError):
            with suppress(OSError):
                place.rename(removed)  # at once, so that others stop
                _delete(removed)
        raise


def _hidden(folder: Path, name: str, state: str = "partial") -> Path:
    return folder / f".{name}.{state}"


def begin(folder: Path, name: str) -> None:
    """Make the hidden folder of a checkpoint, so that other ranks can `contribute` to it from now on.

    Raises:
        TrainerError: it cannot be made, or the checkpoint is there already.
    """
    place = _hidden(folder, name)
    with _told(f"checkpoint {folder / name} cannot be written"):
        _check_is_free(folder / name)
        make_folder(folder)
        _delete(place)
        place.mkdir()


def _check_is_free(path: Path) -> None:
    """Raise `TrainerError` for a valid checkpoint: while it was replaced, there would be neither. A damaged one is."""
    if path.exists():
        with suppress(DataError):
            load(path)
            raise TrainerError(f"checkpoint {path} is there already")


@contextmanager
def _told(problem: str) -> Iterator[None]:
    """Raise an `OSError` as a `TrainerError` of one line: what failed, and why."""
    try:
        yield
    except OSError as error:
        where = f"{Path(os.fsdecode(error.filename)).name}: " if error.filename else ""
        raise TrainerError(f"{problem}: {where}{error.strerror or error}") from None


def prune(folder: Path, keep: Collection[Path]) -> None:
    """Remove all checkpoints except those to keep, and what an interrupted removal has left.

    Raises:
        TrainerError: one cannot be removed.
    """
    kept = {path.name for path in keep}
    old = [path for path in find(folder) if path.name not in kept]
    with _told(f"old checkpoints in {folder} cannot be removed"):
        for path in old:
            _hide(path)
        if old:
            sync_folder(folder)  # a checkpoint must have lost its name on the disk before it loses a file
        _delete_hidden(folder, "removed")


def remove_partial(folder: Path) -> None:
    """Remove what interrupted calls have left. Only the folder's writer may call it, before its first `commit`.

    Raises:
        TrainerError: something cannot be removed.
    """
    with _told(f"what was left in {folder} cannot be removed"):
        _delete_hidden(folder, "partial", "removed")


def _hide(path: Path) -> None:
    """Rename a checkpoint so that it no longer counts as one: an interrupted removal leaves no half checkpoint."""
    hidden = _hidden(path.parent, path.name, "removed")
    _delete(hidden)
    path.rename(hidden)


def _delete_hidden(folder: Path, *states: str) -> None:
    with suppress(FileNotFoundError):
        for path in list(folder.iterdir()):
            match = _HIDDEN.fullmatch(path.name)
            if match and order_of(match["name"]) and match["state"] in states:
                _delete(path)


def _delete(path: Path) -> None:
    """Delete a file, a folder with all that is in it, or nothing if there is nothing.

    `shutil.rmtree` would do, but after a failed close Python 3.11's closes the descriptor's number once more, which may
    be another thread's file by then.
    """
    if path.is_dir() and not path.is_symlink():
        for entry in list(path.iterdir()):
            _delete(entry)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _stops_with_others() -> Iterator[None]:
    """Raise `OthersFailedError` where another rank has taken the folder away that this one writes into."""
    try:
        yield
    except FileNotFoundError:
        raise OthersFailedError("another rank could not write its part") from None


def _collect(place: Path, files: Set[str]) -> dict[str, FileEntry]:
    """Return the entries of files that other ranks announce, under their own names in the folder.

    Raises:
        OthersFailedError: nothing more comes.
        FileNotFoundError: a rank has taken the folder away.
        OSError: the folder cannot be read.
    """
    entries: dict[str, FileEntry] = {}
    bytes_before, moved_at = -1, time.monotonic()
    while missing := files - set(entries):
        try:
            sizes = {path.name: path.stat().st_size for path in place.iterdir()}
        except FileNotFoundError:
            if place.exists():
                continue  # a file was renamed between the two calls
            raise
        for name in sizes:
            if (match := _ANNOUNCED.fullmatch(name)) and match["file"] in missing:
                (place / name).rename(place / match["file"])
                entries[match["file"]] = FileEntry(size=int(match["size"]), sha256=match["sha256"])
        if (bytes_now := sum(sizes.values())) != bytes_before:
            bytes_before, moved_at = bytes_now, time.monotonic()
        elif time.monotonic() - moved_at > TIMEOUT_S:
            raise OthersFailedError(f"other ranks have not written {', '.join(sorted(missing))} within {TIMEOUT_S:g} s")
        time.sleep(_POLL_S)
    return entries

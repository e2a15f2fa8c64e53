"""Committed checkpoints: their names and manifests, finding them, and checking them.

What is said here of a folder of checkpoints is all that "committed" means: a name that `name_of` makes, and a manifest
whose files are what it says.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.disk.durable import FileEntry
from trainer.errors import ConfigError, DataError, TrainerError
from trainer.untrusted import open_file, read_file
from trainer.watch.heartbeat import progress

MANIFEST = "manifest.json"
_FORMAT = 1
_CHUNK_BYTES = 8 << 20
_ANOTHER_KIND = (errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.ELOOP)
"""Errors of a place at which something else is than a file or a folder, which no later try would change."""
_NAME = re.compile(r"attempt-(\d+)-epoch-(\d+)-update-(\d+)")

Order = tuple[int, int, int]
"""Attempt, epoch and update: the larger one is the newer checkpoint."""


def name_of(attempt: int, epoch: int, update: int) -> str:
    """Return a checkpoint's name."""
    return f"attempt-{attempt:04d}-epoch-{epoch:04d}-update-{update:08d}"


def order_of(name: str) -> Order | None:
    """Return the numbers in a checkpoint's name, or None if it is no checkpoint's."""
    if not (match := _NAME.fullmatch(name)):
        return None
    attempt, epoch, update = map(int, match.groups())
    return (attempt, epoch, update) if name_of(attempt, epoch, update) == name else None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint's manifest says."""

    name: str
    facts: Mapping[str, Any]
    """What the writer says of the checkpoint. JSON gives it back: tuples are lists then."""
    files: Mapping[str, FileEntry]

    @property
    def order(self) -> Order:
        """The numbers in the checkpoint's name."""
        order = order_of(self.name)
        assert order is not None  # noqa: S101 -- `from_bytes` takes no other name
        return order

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON, with a hash of all that it says."""
        content = {
            "format": _FORMAT,
            "name": self.name,
            "facts": self.facts,
            "files": {name: asdict(entry) for name, entry in self.files.items()},
        }
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        return (json.dumps({**content, "sha256": digest}, indent=2) + "\n").encode()

    @staticmethod
    def from_bytes(data: bytes) -> Manifest:
        """Read a manifest.

        Raises:
            DataError: it is damaged; the text says so.
            ConfigError: it is of a later format, which another version of trainer has written.
        """
        damaged = DataError(f"{MANIFEST} is damaged")
        try:
            content = json.loads(data)
            version = content["format"]
            if version != _FORMAT:
                kind = ConfigError if isinstance(version, int) and version > _FORMAT else DataError
                raise kind(f"{MANIFEST} has format {version!r}; this version of trainer reads format {_FORMAT}")
            files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
            manifest = Manifest(name=content["name"], facts=content["facts"], files=files)
            # The same content has the same bytes, so this covers the hash, and the characters around the values too.
            is_whole = manifest.to_bytes() == data and all(isinstance(entry.size, int) for entry in files.values())
            if not (is_whole and isinstance(manifest.facts, dict)) or order_of(manifest.name) is None:
                raise damaged
        except ConfigError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise damaged from None
        check_file_names(manifest.files)
        return manifest


def check_file_names(names: Collection[str]) -> None:
    """Raise `DataError` for a file outside of the checkpoint's folder: a manifest from another host is not trusted."""
    for name in names:
        if name in ("", ".", "..", MANIFEST) or "/" in name or not name.isprintable():
            raise DataError(f"a checkpoint cannot have a file named {name!r}; valid is a plain file name")


@dataclass(frozen=True, kw_only=True)
class Committed(Manifest):
    """A checkpoint whose files are all what was written."""

    path: Path
    """Its folder, which may have been renamed."""


def find(folder: Path) -> list[Path]:
    """Return the folders with a checkpoint's name, newest first.

    Raises:
        DataError: `folder` is none.
        TrainerError: it cannot be read now.
    """
    try:
        checkpoints = [(order, path) for path in folder.iterdir() if (order := order_of(path.name))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(f"checkpoints in {folder} cannot be listed", error) from None
    return [path for _, path in sorted(checkpoints, reverse=True)]


def load(path: Path) -> Committed:
    """Read a checkpoint's manifest, and check each file's size and hash. The folder may have been renamed.

    Raises:
        DataError: it is not what was written; the text names the first file that is wrong.
        TrainerError: a file cannot be read now, which says nothing of what is in it.
    """
    with _naming(path, MANIFEST):
        data = read_file(path / MANIFEST)
    try:
        manifest = Manifest.from_bytes(data)
    except (ConfigError, DataError) as error:
        raise type(error)(f"checkpoint {path}: {error}") from None
    for name, entry in manifest.files.items():
        with _naming(path, name), open_file(path / name) as file:
            size, digest = os.fstat(file.fileno()).st_size, hashlib.sha256()
            if size != entry.size:
                raise DataError(f"checkpoint {path}: {name} has {size:,} bytes instead of {entry.size:,}")
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                progress()  # a large file takes minutes
        if digest.hexdigest() != entry.sha256:
            raise DataError(f"checkpoint {path}: {name} is damaged: its hash is not the manifest's")
    return Committed(path=path, **vars(manifest))


@contextmanager
def _naming(path: Path, name: str) -> Iterator[None]:
    """Raise an `OSError` as an error of one line, which names the checkpoint and the file that cannot be read."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"checkpoint {path}: {name} is missing") from None
    except OSError as error:
        raise _unreadable(f"checkpoint {path}: {name} cannot be read", error) from None


def _unreadable(text: str, error: OSError) -> TrainerError:
    """Return the error for what cannot be read: damage only where something else is there in its place.

    A file system over a network fails for a while, and a checkpoint is not to be passed over for that, or removed.
    """
    kind = DataError if error.errno in _ANOTHER_KIND else TrainerError
    return kind(f"{text}: {error.strerror}")


def newest(folder: Path, on_bad: Callable[[str], object], read: Callable[[Path], Committed] = load) -> Committed | None:
    """Return the newest valid checkpoint, or None. `on_bad` is told of each that `read` has found to be damaged.

    Raises:
        TrainerError: the folder or a checkpoint cannot be read, or is of another format.
    """
    for path in find(folder):
        try:
            return read(path)
        except DataError as error:
            if path in find(folder):  # else the writer has just pruned it
                on_bad(str(error))
    return None

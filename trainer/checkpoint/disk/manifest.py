"""A checkpoint's manifest: its name, the writer's facts, and the size and hash of each file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainer.checkpoint.disk.durable import FileEntry
from trainer.errors import DataError

MANIFEST = "manifest.json"
_FORMAT = 1
_NAME = re.compile(r"attempt-(\d+)-epoch-(\d+)-update-(\d+)")

Order = tuple[int, int, int]
"""Attempt, epoch and update: the larger one is the newer checkpoint."""


def name_of(attempt: int, epoch: int, update: int) -> str:
    """Return a checkpoint's name.

    Raises:
        ValueError: a number is negative.
    """
    if min(attempt, epoch, update) < 0:
        raise ValueError(f"a checkpoint's numbers are not negative: {attempt}, {epoch}, {update}")
    return f"attempt-{attempt:04d}-epoch-{epoch:04d}-update-{update:08d}"


def order_of(name: str) -> Order | None:
    """Return the numbers in a checkpoint's name, or None if `name_of` never returns this name."""
    if not (match := _NAME.fullmatch(name)):
        return None
    attempt, epoch, update = map(int, match.groups())
    return (attempt, epoch, update) if name_of(attempt, epoch, update) == name else None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint's manifest says."""

    name: str
    facts: Mapping[str, Any]
    files: Mapping[str, FileEntry]

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

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read a manifest.

        Raises:
            DataError: it is damaged or of another format; the text is what is wrong with it.
        """
        damaged = DataError(f"{MANIFEST} is damaged")
        try:
            content = json.loads(data)
            version = content["format"]
            if version != _FORMAT:
                raise DataError(f"{MANIFEST} has format {version!r}; this version of trainer reads format {_FORMAT}")
            files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
            manifest = cls(name=content["name"], facts=content["facts"], files=files)
            # The same content has the same bytes, so this covers the hash, and the characters around the values too.
            is_whole = manifest.to_bytes() == data and all(isinstance(entry.size, int) for entry in files.values())
            if not is_whole or order_of(manifest.name) is None:
                raise damaged
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise damaged from None
        check_file_names(manifest.files)
        return manifest


def check_file_names(names: Collection[str]) -> None:
    """Check that each file lies in the checkpoint's folder itself. A manifest from another host is not trusted.

    Raises:
        DataError: one does not.
    """
    for name in names:
        if name in ("", ".", "..", MANIFEST) or "/" in name or "\0" in name:
            raise DataError(f"a checkpoint cannot have a file named {name!r}; valid is a plain file name")

"""Targets that come from a disk that others can write."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
from functools import cache
from pathlib import Path

from tests.security.fuzz.target import Target
from trainer.checkpoint.disk.committed import Manifest, load, name_of, order_of
from trainer.checkpoint.disk.durable import FileEntry
from trainer.checkpoint.run.storage import load_run
from trainer.errors import DataError
from trainer.ops import requeue
from trainer.untrusted import parse_json, read_dict

_MEMORY = Path("/dev/shm")  # noqa: S108 (a folder of our own in it)


@cache
def _folder() -> Path:
    holder = tempfile.TemporaryDirectory(prefix="trainer-fuzz-", dir=_MEMORY if _MEMORY.is_dir() else None)
    _holders.append(holder)
    return Path(holder.name)


_holders: list[tempfile.TemporaryDirectory[str]] = []
"""Keeps the folder until Python ends."""


@cache
def _in_memory(name: str) -> int:
    """Return the descriptor of a file in memory, to which a link with this name leads: no input makes a file."""
    descriptor = os.memfd_create(name)
    (_folder() / name).symlink_to(f"/proc/self/fd/{descriptor}")
    return descriptor


def _file(name: str, data: bytes) -> Path:
    descriptor = _in_memory(name)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, data, 0)
    return _folder() / name


def _manifest(data: bytes) -> None:
    manifest = Manifest.from_bytes(data)
    assert manifest.to_bytes() == data
    assert manifest.order
    for name, entry in manifest.files.items():
        (_folder() / name).is_file()
        assert f"{entry.size:,}"


def _hashed_manifest(data: bytes) -> None:
    """Read a manifest whose hash was made anew, as by somebody who knows what it is made of."""
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(data)
        if isinstance(content, dict):
            content.pop("sha256", None)
            digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
            data = (json.dumps({**content, "sha256": digest}, indent=2) + "\n").encode()
    _manifest(data)


def _checkpoint(data: bytes) -> None:
    """Load a checkpoint whose manifest has these bytes."""
    _file("state.pt", b"state")
    load(_file("manifest.json", data).parent)


def _facts(data: bytes) -> None:
    """Go on from a checkpoint with these facts, and a manifest that is whole."""
    try:
        facts = parse_json(data)
    except ValueError:
        return
    manifest = Manifest(name=name_of(1, 2, 3), facts=facts if isinstance(facts, dict) else {}, files={})
    checkpoint = load_run(_file("manifest.json", manifest.to_bytes()).parent)
    assert checkpoint.facts["written"].isprintable()
    if best := checkpoint.facts["best"]:
        assert isinstance(best[0], int | float)
        assert order_of(best[1])


def _manifests() -> list[bytes]:
    files = {"state.pt": FileEntry(size=5, sha256=hashlib.sha256(b"state").hexdigest())}
    facts = {"epoch": 1, "best": [0.5, name_of(1, 1, 2)], "complete": False, "resume": "auto", "lr": 1e-3, "é": None}
    whole = Manifest(name=name_of(1, 2, 3), facts=facts, files=files)
    return [whole.to_bytes(), Manifest(name=name_of(1, 2, 3), facts={}, files={}).to_bytes()]


def _all_facts() -> list[bytes]:
    facts = {"written": "2026-01-01T00:00:00+0000", "best": [0.5, name_of(1, 1, 2)]}
    return [json.dumps({**facts, "best": best}).encode() for best in (facts["best"], None)]


def _lock(data: bytes) -> None:
    assert isinstance(read_dict(_file("lock", data)), dict)


def _requeue(data: bytes) -> None:
    """Decide by the logs of a start, whose first line is the file `unsaved`."""
    unsaved, _, messages = data.partition(b"\n")
    folder = _file("unsaved", unsaved).parent
    _file("srun.log", messages)
    with contextlib.redirect_stdout(io.StringIO()):
        assert isinstance(requeue.decide(1, folder, True, "true"), int)


TARGETS = (
    Target("manifest", _manifest, _manifests, (DataError,)),
    Target("manifest, hashed anew", _hashed_manifest, _manifests, (DataError,)),
    Target("checkpoint's folder", _checkpoint, _manifests, (DataError,)),
    Target("a checkpoint's facts", _facts, _all_facts, (DataError,)),
    Target("checkpoints' lock", _lock, lambda: [b'{"job": "a job", "process": 1, "host": "a"}', b""]),
    Target("requeue's logs", _requeue, lambda: [b"1\nsrun: error: a: task 0: Exited with exit code 75\n", b"\n"]),
)
"""Those of this module."""

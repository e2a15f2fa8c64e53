"""What the tests of checkpoint folders share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from trainer.checkpoint.disk.commit import commit
from trainer.checkpoint.disk.committed import name_of

NAME = name_of(1, 2, 300)
FACTS = {"written": "2026-01-01T00:00:00+0000", "best": None}
"""Those of a run that going on reads."""
FILES = {"weights.pt": b"w" * 3_000_000, "loader.json": b"{}", "empty": b""}

Writer = Callable[[BinaryIO], object]


def writers(contents: Mapping[str, bytes] = FILES) -> dict[str, Writer]:
    def writer(content: bytes) -> Writer:
        return lambda file: file.write(content)

    return {name: writer(content) for name, content in contents.items()}


def save(folder: Path, update: int, **facts: Any) -> Path:
    return commit(folder, name_of(1, 1, update), writers(), facts).path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def never(text: str) -> None:
    raise AssertionError(text)


def failing_at(monkeypatch: pytest.MonkeyPatch, name: str, number: int, *errors: int) -> None:
    """The call number `number` (from 0) of os.`name` and those after it fail with these errors, one each."""
    call, outcomes = getattr(os, name), [0] * number + list(errors)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if outcomes and (code := outcomes.pop(0)):
            raise OSError(code, os.strerror(code))
        return call(*args, **kwargs)

    monkeypatch.setattr(os, name, failing)

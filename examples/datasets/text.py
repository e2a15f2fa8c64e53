"""A folder of text as sequences of bytes, for a model that predicts the next byte."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from trainer import DataError, InMemory

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
"""Python's own source code: 13 MB of text that is there wherever this runs."""
_LEFT_OUT = {"__pycache__", "site-packages", "dist-packages", "test", "tests"}


def load_text(folder: Path, length: int, limit: int | None = None) -> tuple[InMemory, InMemory]:
    """Return a folder's text in windows of `length` bytes: nine of ten for training, each tenth for testing.

    A sample's input is a window, its target the byte that follows each of the window's; both uint8, shape (length,).

    Args:
        folder: all files in it and below count, but for those that hold a byte 0, which text does not.
        limit: read no more than so many bytes.

    Raises:
        DataError: a file cannot be read, or there are fewer than 100 windows.
    """
    text = bytearray()
    for file in sorted(folder.rglob("*")):
        if limit is not None and len(text) >= limit:
            break
        if file.is_file() and _LEFT_OUT.isdisjoint(file.relative_to(folder).parts):
            try:
                content = file.read_bytes()
            except OSError as error:
                raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
            text += content if b"\0" not in content else b""
    del text[limit:]
    count = (len(text) - 1) // length
    if count < 100:
        raise DataError(f"{folder} has {len(text):,} bytes of text to read; 100 windows take {100 * length + 1:,}")
    numbers = torch.frombuffer(text, dtype=torch.uint8)
    inputs, targets = (numbers[start : start + count * length].view(count, length) for start in (0, 1))
    is_test = torch.arange(count) % 10 == 0
    return _select(inputs, targets, ~is_test), _select(inputs, targets, is_test)


def _select(inputs: Tensor, targets: Tensor, which: Tensor) -> InMemory:
    return InMemory(inputs[which], targets[which])

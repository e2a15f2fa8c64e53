"""Damage to a checkpoint's files. Each function is given one of them, and returns the one that it damaged."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint.disk.committed import MANIFEST


def _flip(file: Path, random: random.Random) -> Path:
    data = bytearray(file.read_bytes())
    data[random.randrange(len(data))] ^= random.randrange(1, 256)
    file.write_bytes(data)
    return file


def _flip_digit(file: Path, random: random.Random) -> Path:
    manifest = file.with_name(MANIFEST)
    text = manifest.read_text()
    at = random.choice([i for i, character in enumerate(text) if character.isdigit()])
    manifest.write_text(f"{text[:at]}{(int(text[at]) + random.randrange(1, 10)) % 10}{text[at + 1 :]}")
    return manifest


def _truncate(file: Path, random: random.Random) -> Path:
    os.truncate(file, random.randrange(file.stat().st_size))
    return file


def _remove(file: Path, random: random.Random) -> Path:
    file.unlink()
    return file


DAMAGES: dict[str, Callable[[Path, random.Random], Path]] = {
    "a byte of the newest changed": _flip,
    "a digit of the newest's manifest changed": _flip_digit,
    "a file of the newest cut short": _truncate,
    "a file of the newest removed": _remove,
}

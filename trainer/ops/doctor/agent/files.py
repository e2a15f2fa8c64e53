"""Small files of the system, of which many are missing on some hosts."""

from __future__ import annotations

from pathlib import Path


def read_text(path: str | Path) -> str:
    """Return what is in a file; empty where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def read_number(path: str | Path) -> int | None:
    """Return the number in a file; None where there is none."""
    try:
        return int(read_text(path))
    except ValueError:
        return None

"""The command that starts a training, as `trainer run` and `trainer submit` take it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def name_of(command: Sequence[str]) -> str:
    """Return the stem of the script, the module of `python -m`, or the program's name."""
    # Anywhere else, -m is an option of the script's own.
    if len(command) > 2 and command[1] == "-m":
        return command[2]
    return Path(next((word for word in command if word.endswith(".py")), command[0])).stem

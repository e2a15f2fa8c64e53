"""The command that starts a training, as `trainer run`, `trainer doctor` and `trainer submit` take it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def without_dashes(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command without the `--` that may stand before it."""
    return tuple(command[1:] if command[:1] == ["--"] else command)


def script_of(command: Sequence[str]) -> str:
    """Return the training script's path as it stands in the command; empty without one."""
    return next((word for word in command if word.endswith(".py")), "")


def name_of(command: Sequence[str]) -> str:
    """Return the stem of the script, the module of `python -m`, or the program's name."""
    # Anywhere else, -m is an option of the script's own.
    if len(command) > 2 and command[1] == "-m":
        return command[2]
    return Path(script_of(command) or command[0]).stem

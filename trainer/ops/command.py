"""The command that starts a training, as it is given to `trainer run` and `trainer doctor`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.cluster.launchers import PROGRAMS

_PYTHON = re.compile(r"python[\d.]*")
_ENDS_OPTIONS = re.compile(r"-[^-WXmc]*([mc])(.*)")
"""Python's option with a module or a program, perhaps behind other letters, and with its value behind it."""
_STARTERS = {*PROGRAMS, "accelerate", "deepspeed", "trainer"}


@dataclass(frozen=True)
class Target:
    """What a command starts: its program, or what Python runs."""

    program: str
    script: str = ""
    """The file that Python runs."""
    module: str = ""
    """The module that `python -m` runs."""


def to_command(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command without the `--` that may stand before it."""
    return tuple(words[1:] if words[:1] == ["--"] else words)


def target_of(command: Sequence[str]) -> Target:
    """Return what a command starts, as far as its words tell."""
    program, *rest = command
    if _PYTHON.fullmatch(Path(program).name):
        while rest:
            word = rest.pop(0)
            if found := _ENDS_OPTIONS.fullmatch(word):
                option, value = found.groups()
                return Target(program, module=(value or "".join(rest[:1])) if option == "m" else "")
            if not word.startswith("-"):
                return Target(program, script=word)
            del rest[: word in ("-W", "-X")]  # which take a value
    return Target(program)


def script_of(command: Sequence[str]) -> str:
    """Return the training script's path as it stands in the command; empty without one."""
    return next((word for word in command if word.endswith(".py")), "")


def name_of(command: Sequence[str]) -> str:
    """Return a name for a job: the stem of the script, the module of `python -m`, or the program's name.

    It has letters, digits, ".", "_" and "-" only.
    """
    target = target_of(command)
    name = target.module or Path(target.script or script_of(command) or target.program).stem
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "train"


def refuse_launcher(command: Sequence[str], starter: str) -> str:
    """Return what is wrong with a command that starts several processes by itself; empty for any other command.

    Args:
        starter: who starts a process for each rank already.
    """
    target = target_of(command)
    launcher = target.module or Path(target.script or target.program).name
    if launcher not in _STARTERS:
        return ""
    return (
        f"the command begins with {launcher}, but {starter} starts the ranks itself; give what one rank runs, "
        f"as in -- python {script_of(command) or 'train.py'}"
    )

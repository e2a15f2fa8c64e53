"""The command that starts a training, as it is given to `trainer run` and `trainer doctor`."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from trainer.cluster.launchers import PROGRAMS

_PYTHON = re.compile(r"python[\d.]*")
_ENDS_OPTIONS = re.compile(r"-[^-WXmc]*([mc])(.*)|-")
"""Python's option with a module or a program, perhaps behind other letters, and with its value; or standard input."""
_TAKES_VALUE = re.compile(r"-[^-WXmc]*[WX]|--check-hash-based-pycs")
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
            del rest[: bool(_TAKES_VALUE.fullmatch(word))]
    return Target(program)


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return the valid word that a mistyped one is most like, as a question; empty where it is like none."""
    near = get_close_matches(word, sorted(valid), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def refuse_missing(command: Sequence[str], path: str) -> str:
    """Return what a command that is to run here names and is not there; empty where all is.

    Args:
        path: the PATH on which its program is looked for.
    """
    target, program = target_of(command), shutil.which(command[0], path=path)
    script, package = Path(target.script), target.module.partition(".")[0]
    if program is None:
        hint = f" (did you mean python {command[0]}?)" if Path(command[0]).is_file() else ""
        return f"there is no command {command[0]!r}{hint or did_you_mean(command[0], ['python'])}"
    if target.script and not script.exists():
        return f"there is no file {target.script!r}{did_you_mean(target.script, map(str, script.parent.glob('*.py')))}"
    # Another Python may have other modules.
    is_ours = package and Path(program).parent.samefile(Path(sys.executable).parent)
    if is_ours and not (PathFinder.find_spec(package, ["."]) or find_spec(package)):
        return f"there is no module {package!r}"
    return ""


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

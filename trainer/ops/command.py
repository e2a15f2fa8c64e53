"""The command that starts a training, as it is given to `trainer run` and `trainer doctor`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_PYTHON, _SHELL = re.compile(r"(python|pypy)[\d.]*"), re.compile(r"(ba|da|k|z)?sh")
# Options that end an interpreter's own options, and options with a value, which may also be the next word.
_PYTHON_ENDS, _PYTHON_VALUES = "cm", "WX"
_SHELL_ENDS, _SHELL_VALUES = "c", "oO"
_OF_MPI = {"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "srun", "jsrun", "aprun"}
_OF_TORCH = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}
_OF_HOROVOD = {"horovodrun", "horovod.runner", "horovod.runner.launch"}
_OTHERS = {"deepspeed", "deepspeed.launcher.runner", "accelerate.commands.launch"}
_LAUNCHERS = _OF_MPI | _OF_TORCH | _OF_HOROVOD | _OTHERS
"""Programs and modules that start several processes of a training."""
_SUBCOMMANDS = {"accelerate": "launch", "trainer": "run"}
"""Programs and modules that do so with this word."""
_WRAPPERS = {"env", "exec", "nice", "ionice", "nohup", "time", "timeout", "numactl", "taskset", "stdbuf", "setsid"} | {
    "nsys"
}
"""Programs that start the program whose name follows, behind options of their own."""
_CONTAINERS = {"apptainer", "singularity"}
_ENVIRONMENTS = {"uv", "poetry", "pipenv", "pdm", "hatch", "pixi", "conda", "mamba", "micromamba"} | _CONTAINERS
"""The same, perhaps in another folder, or with other files."""


class OptionsParser(argparse.ArgumentParser):
    """A parser of the options in front of a command."""

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings and arg_strings == ["--"]:  # of `--name=--` older Pythons make an empty list
            self.error(f"argument {'/'.join(action.option_strings)}: '--' is no value")
        return super()._get_values(action, arg_strings)


@dataclass(frozen=True)
class Target:
    """The program that a command starts in the end, behind `env`, other wrappers and interpreters."""

    program: str
    script: str = ""
    """The file that an interpreter runs."""
    module: str = ""
    """The module that `python -m` runs."""
    launcher: str = ""
    """How the command names a launcher of several processes; empty for any other program."""


def to_command(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command without the `--` that may stand before it, its environment variables as `env` takes them."""
    command = tuple(words[1:] if words[:1] == ["--"] else words)
    if all(map(_ASSIGNMENT.fullmatch, command)):
        return ()
    return ("env", *command) if _ASSIGNMENT.fullmatch(command[0]) else command


def target_of(command: Sequence[str]) -> Target:
    """Return what a command starts in the end, as far as its words tell."""
    at = _behind_wrappers(command)
    program, *rest = command[at:]
    name = Path(program).name
    if _PYTHON.fullmatch(name):
        option, value, behind = _script_of(rest, _PYTHON_ENDS, _PYTHON_VALUES)
        if option:
            module = value if option == "m" else ""
            launcher = _launcher(module, behind)
            return Target(program, "", module, f"{name} -m {launcher}" if launcher else "")
        return Target(program, value, "", _launcher(Path(value).name, behind))
    if _SHELL.fullmatch(name):
        option, value, _ = _script_of(rest, _SHELL_ENDS, _SHELL_VALUES)
        if option and (words := re.findall(r"[^\s;&|()]+", value)):
            return target_of(["env", *words])
        return Target(program, value)
    return Target(program, launcher=_launcher(name, rest))


def script_of(command: Sequence[str]) -> str:
    """Return the training script's path as it stands in the command; empty without one."""
    return next((word for word in command if word.endswith(".py")), "")


def name_of(command: Sequence[str]) -> str:
    """Return a name for a job: the stem of the script, the module of `python -m`, or the program's name.

    It has letters, digits, ".", "_" and "-" only.
    """
    target = target_of(command)
    name = target.module or Path(target.script or script_of(command) or target.program or command[0]).stem
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "train"


def refuse_launcher(command: Sequence[str], starter: str) -> str:
    """Return what is wrong with a command that starts several processes by itself; empty for any other command.

    Args:
        starter: who starts a process for each rank already.
    """
    launcher = target_of(command).launcher if command else ""
    if not launcher:
        return ""
    script = next((word for word in command if word.endswith(".py") and " " not in word), "train.py")
    return (
        f"the command begins with {launcher}, but {starter} starts the ranks itself; give what one rank runs, "
        f"as in -- python {script}"
    )


def _behind_wrappers(command: Sequence[str]) -> int:
    """Return where the program stands."""
    if Path(command[0]).name not in _WRAPPERS | _ENVIRONMENTS:
        return 0
    others = [at for at, word in enumerate(command) if at and not (word.startswith("-") or _ASSIGNMENT.fullmatch(word))]
    # Which options of a wrapper take values is not known, so a word that is known to be a program comes first.
    known = [at for at in others if _is_known(command[at])]
    return min(known or others or [0])


def _is_known(word: str) -> bool:
    name = Path(word).name
    is_interpreter = _PYTHON.fullmatch(name) or _SHELL.fullmatch(name)
    return bool(is_interpreter or name in _LAUNCHERS or name in _SUBCOMMANDS or word.endswith((".py", ".sh")))


def _script_of(words: Sequence[str], ends: str, with_value: str) -> tuple[str, str, Sequence[str]]:
    """Return the option that ends an interpreter's options, if any, then its value or the script, and what follows."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "-" or not word.startswith("-"):
            return "", word.removeprefix("-"), rest
        for at, letter in enumerate(word[1:] if word[1] != "-" else "", 2):
            if letter in ends:
                value = word[at:] or "".join(rest[:1])
                return letter, value, rest if word[at:] else rest[1:]
            if letter in with_value:
                del rest[: not word[at:]]
                break
    return "", "", rest


def _launcher(name: str, rest: Sequence[str]) -> str:
    if name in _LAUNCHERS:
        return name
    word = next((word for word in rest if not word.startswith("-")), "")
    return f"{name} {word}" if _SUBCOMMANDS.get(name, "") == word != "" else ""

"""What `trainer run` and `trainer.launch` are asked for: the checks, and the command line."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trainer.cluster.launchers import STARTS
from trainer.errors import ConfigError
from trainer.ops.command import did_you_mean, name_of, refuse_launcher, to_command
from trainer.ops.supervise.hosts import Host, parse_hosts, slots_of

_DESCRIPTION = """\
Start a training with its launcher, watch it, and start it again after a
failure, on the hosts that are left. The training goes on from its newest
checkpoint; the script writes and reads it.
"""
_EPILOG = """\
examples:
  trainer run -np 2 python train.py
  trainer run -np 4 -H a:2,b:2 --min-np 2 python train.py --epochs 90
  trainer run @options.txt python train.py     # with the options of a file

exit codes: 0 done, 75 preempted and saved, 78 a user's mistake, 1 given up,
2 these options are not valid
"""
_OPTIONS: dict[str, tuple[str, Callable[[str], Any], str, str]] = {
    "np": ("-np", int, "N", "number of ranks"),
    "hosts": ("-H", str, "HOST:SLOTS,…", "hosts and their slots (localhost:N)"),
    "name": ("--name", str, "NAME", "name of the folder runs/NAME (the script's)"),
    "min_np": ("--min-np", int, "N", "go on with N ranks at least (-np)"),
    "max_restarts": ("--max-restarts", int, "N", "give up after N restarts (%(default)s)"),
    "timeout_s": ("--timeout", float, "S", "restart after S seconds without any progress; 0: never (600)"),
    "hang_timeout_s": ("--hang-timeout", float, "S", "restart when ranks wait S seconds for another; 0: never (540)"),
    "wait_for_hosts_s": ("--wait-for-hosts", float, "S", "wait S seconds while hosts are too few (%(default).0f)"),
}
"""Options of the command line, by their names in `Options`: each with its type, what it takes, and its help."""

Streams = tuple[int | None, int | None, int | None]
"""Standard input, output and error as `subprocess.Popen` takes them."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is to be started and watched."""

    np: int
    hosts: tuple[Host, ...]
    command: tuple[str, ...]
    min_np: int
    launcher: str = "horovodrun"
    max_restarts: int = 100
    timeout_s: float | None = None
    """None counts 600 s from the first rank's heartbeat on, and a number from the launcher's start: a script may never
    call `trainer.init`, and heartbeats be out of sight, as in a container with a /tmp of its own."""
    wait_for_hosts_s: float = 600.0
    hang_timeout_s: float | None = None
    name: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the job beside this process's own."""
    streams: Streams = (None, None, None)

    @property
    def folder(self) -> Path:
        """The folder with the lock, the job's id and the events."""
        return Path("runs", self.name)


def check(given: Mapping[str, Any], is_command: bool = False) -> dict[str, Any]:
    """Check options of a job; return them with hosts as `Host`, and without those that are None.

    Args:
        given: by their names in `Options`, with hosts as text.
        is_command: whether errors name them as the command line does.

    Raises:
        ConfigError: a value is not valid.
    """
    label = (lambda name: _OPTIONS[name][0]) if is_command else str
    np, text, least = given["np"], given["hosts"], given["min_np"]
    if np is None or np < 1:
        raise ConfigError(f"{label('np')} is {'missing' if np is None else np}; valid is a number of at least 1")
    hosts = parse_hosts(text, label("hosts")) if text is not None else (Host("localhost", np),)
    if slots_of(hosts) < np:
        raise ConfigError(f"{label('np')} is {np}, and {label('hosts')} {text} has {slots_of(hosts)} slots")
    if least is not None and not 1 <= least <= np:
        raise ConfigError(f"{label('min_np')} is {least}; valid is 1 to {np}, which {label('np')} is")
    if given["launcher"] not in STARTS:
        raise ConfigError(f"launcher is {given['launcher']!r}; valid are {', '.join(STARTS)}")
    for name, value in given.items():
        if isinstance(value, int | float) and not value >= 0:
            raise ConfigError(f"{label(name)} is {value}; valid is a number of at least 0")
    return {"min_np": np, **{name: value for name, value in given.items() if value is not None}, "hosts": hosts}


class _Parser(argparse.ArgumentParser):
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        # A subcommand would leave an unknown option to the command above it, whose --help does not tell of it.
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            valid = re.findall(r"(?:\s|m)(--?[a-zH][a-z-]*)", self.format_help())  # an m ends a colour
            self.error(f"no such option: {' '.join(unknown)}{did_you_mean(unknown[0].partition('=')[0], valid)}")
        for name, value in vars(parsed).items():
            if name != "command" and value in ([], "--"):  # of `--name=--` older Pythons make an empty list
                self.error(f"argument {_OPTIONS[name][0] if name in _OPTIONS else name}: '--' is no value")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_parser(new: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `run` to the subcommands."""
    parser = new(
        "run",
        help="start a training, and start it again after a failure",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage="trainer run [@FILE] -np N [-H HOST:SLOTS,…] [options] COMMAND …",
    )
    for name, (option, kind, metavar, text) in _OPTIONS.items():
        default = getattr(Options, name, None)
        parser.add_argument(option, dest=name, type=kind, metavar=metavar, default=default, help=text)
    parser.set_defaults(launcher=Options.launcher)
    launchers = parser.add_mutually_exclusive_group()
    for name, row in STARTS.items():
        if name != Options.launcher:
            text = f"start with {' '.join((row.name, *row.starts[name]))}"
            launchers.add_argument(f"--{name}", dest="launcher", action="store_const", const=name, help=text)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def with_file(arguments: Sequence[str]) -> list[str]:
    """Return a command line in which the words of a file, split as by a shell, are in place of `run @FILE`'s @FILE.

    argparse's `fromfile_prefix_chars` would also replace words of the command that the ranks run.

    Raises:
        SystemExit: the file cannot be read.
    """
    if arguments[:1] != ["run"] or not arguments[1:2] or not arguments[1].startswith("@"):
        return list(arguments)
    try:
        return ["run", *shlex.split(Path(arguments[1][1:]).read_text(), comments=True), *arguments[2:]]
    except (OSError, ValueError) as error:
        print(f"trainer run: {arguments[1]}: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        sys.exit(2)


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of a command with subcommands, whose errors are one line."""
    return _Parser(prog=prog, description="Runs trainings on several processes and hosts.", allow_abbrev=False)


def to_options(parsed: argparse.Namespace) -> Options:
    """Return the checked options of `trainer run`.

    Raises:
        ConfigError: a value is not valid, or there is no command.
    """
    given = {name: getattr(parsed, name) for name in (*_OPTIONS, "launcher", "command")}
    checked = check(given, is_command=True)
    command = to_command(given["command"])
    if not command:
        raise ConfigError("there is no command to start; put it at the end, as in trainer run -np 2 python train.py")
    if problem := refuse_launcher(command, "trainer run"):
        raise ConfigError(problem)
    name = given["name"] or name_of(command)
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*", name):
        raise ConfigError(f"--name is {name!r}; valid are letters, digits, '.', '_' and '-'")
    return Options(**{**checked, "command": command, "name": name})

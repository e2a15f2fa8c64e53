"""The command line of `trainer run`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from trainer.errors import ConfigError
from trainer.ops.command import OptionsParser, name_of, refuse_launcher, to_command
from trainer.ops.config_file import read_config
from trainer.ops.supervise.hosts import Host, parse_hosts, slots_of

_DESCRIPTION = """\
Start a training with its launcher, watch it, and start it again after a failure, on the hosts that are left.
The training goes on from its newest checkpoint; the script writes and reads it.
"""
_EPILOG = """\
examples:
  trainer run -np 2 python train.py
  trainer run -np 4 -H a:2,b:2 --min-np 2 python train.py --epochs 90

exit codes:
  0    the training is done
  75   preempted: SIGTERM or SIGUSR2 has come, the ranks have saved; the same command goes on
  78   a mistake of the user's, which another start would repeat
  1    given up: the same failure again and again, too many restarts, or too few hosts
  2    these options are not valid; 127: the command does not exist; 130: Ctrl-C

Lines of this program begin with "trainer run: ". They are also in runs/NAME/events.jsonl.
"""
_LAUNCHERS = {
    "mpi": "start with horovodrun --mpi",
    "gloo": "start with horovodrun --gloo",
    "torchrun": "start with torchrun, on several hosts through ssh",
}
_NUMBERS = (
    ("--min-np", "min_ranks", "go on with N ranks at least (-np)"),
    ("--max-restarts", "max_restarts", "give up after N restarts (%(default)s)"),
    ("--timeout", "timeout_s", "restart when no rank has made progress for S seconds; 0: never (%(default).0f)"),
    (
        "--hang-timeout",
        "hang_timeout_s",
        "say which rank the others wait for, and restart, after S seconds; 0: never (measured, at least 30)",
    ),
    ("--wait-for-hosts", "wait_for_hosts_s", "with too few hosts, wait S seconds for one to come back (%(default).0f)"),
)
"""Options with a number, none of which may be negative: each with its field of `Options`, and its help."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `trainer run` was asked for."""

    ranks: int
    hosts: tuple[Host, ...]
    command: tuple[str, ...]
    min_ranks: int
    launcher: str = "horovodrun"
    max_restarts: int = 100
    timeout_s: float = 600.0
    wait_for_hosts_s: float = 600.0
    take_back: bool = False
    hang_timeout_s: float | None = None
    name: str = "train"

    @property
    def folder(self) -> Path:
        """The folder with the lock, the job's id and the events."""
        return Path("runs", self.name)


class _Parser(OptionsParser):
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        # A subcommand would leave an unknown option to the command above it, whose --help does not tell of it.
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"no such option: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `run` to the subcommands."""
    parser = subparsers.add_parser(
        "run",
        help="start a training, and start it again after a failure",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="trainer run -np N [-H HOST:SLOTS,…] [options] COMMAND …",
    )
    parser.add_argument("--config", metavar="FILE", help="read options and command from [run] of a TOML file first")
    group = parser.add_argument_group("the job")
    group.add_argument("-np", dest="ranks", type=int, metavar="N", help="number of ranks")
    group.add_argument("-H", dest="hosts", metavar="HOST:SLOTS,…", help="hosts and their slots (localhost:N)")
    launchers = group.add_mutually_exclusive_group()
    for name, text in _LAUNCHERS.items():
        launchers.add_argument(
            f"--{name}", dest="launcher", action="store_const", const=name, default=Options.launcher, help=text
        )
    group.add_argument("--name", help="name of the folder runs/NAME (the script's)")
    group = parser.add_argument_group("after a failure")
    for option, field, text in _NUMBERS:
        kind, metavar = (float, "S") if field.endswith("_s") else (int, "N")
        default = getattr(Options, field, None)
        group.add_argument(option, dest=field, type=kind, metavar=metavar, default=default, help=text)
    text = "when a host is back, have the ranks save, and start again with it at once"
    group.add_argument("--take-back", action="store_true", help=text)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of a command with subcommands, whose errors are one line."""
    return _Parser(prog=prog, description="Runs trainings on several processes and hosts.", allow_abbrev=False)


def parse(arguments: Sequence[str], parser: argparse.ArgumentParser) -> Options:
    """Return the checked options of `trainer run`, those of a --config file among them.

    Args:
        arguments: behind "run".
        parser: which `add_parser` has returned.

    Raises:
        ConfigError: a value is not valid, or there is no command.
    """
    parsed = parser.parse_args(arguments)
    if parsed.config is None:
        return to_options(parsed)
    file = read_config(parsed.config, parser)
    # Of two launchers, the command line's counts; argparse would refuse them.
    of_launchers = {f"--{name}" for name in _LAUNCHERS} if parsed.launcher != Options.launcher else ()
    words = [word for word in file.words if word not in of_launchers]
    try:
        return to_options(parser.parse_args([*words, *arguments, *(() if parsed.command else file.command)]))
    except ConfigError as error:
        raise ConfigError(file.locate(str(error), arguments)) from None


def to_options(parsed: argparse.Namespace) -> Options:
    """Return the checked options.

    Raises:
        ConfigError: a value is not valid, or there is no command.
    """
    ranks = parsed.ranks
    if ranks is None:
        raise ConfigError("-np is missing; valid is a number of at least 1")
    if ranks < 1:
        raise ConfigError(f"-np is {ranks}; valid is a number of at least 1")
    hosts = parse_hosts(parsed.hosts) if parsed.hosts else (Host("localhost", ranks),)
    if slots_of(hosts) < ranks:
        raise ConfigError(f"-np is {ranks}, and -H {parsed.hosts} has {slots_of(hosts)} slots")
    min_ranks = ranks if parsed.min_ranks is None else parsed.min_ranks
    if not 1 <= min_ranks <= ranks:
        raise ConfigError(f"--min-np is {min_ranks}; valid is 1 to {ranks}, which -np is")
    for option, field, _ in _NUMBERS:
        value = getattr(parsed, field)
        if value is not None and not value >= 0:
            raise ConfigError(f"{option} is {value}; valid is a number of at least 0")
    command = to_command(parsed.command)
    if not command:
        raise ConfigError("there is no command to start; put it at the end, as in trainer run -np 2 python train.py")
    if problem := refuse_launcher(command, "trainer run"):
        raise ConfigError(problem)
    name = parsed.name or name_of(command)
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*", name):
        raise ConfigError(f"--name is {name!r}; valid are letters, digits, '.', '_' and '-'")
    given = {field.name: getattr(parsed, field.name) for field in fields(Options)}
    return Options(**{**given, "hosts": hosts, "min_ranks": min_ranks, "command": command, "name": name})

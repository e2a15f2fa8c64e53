"""The command line of `trainer run`."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trainer.errors import ConfigError
from trainer.ops.command import OptionsParser, name_of, refuse_launcher, to_command
from trainer.ops.supervise.hosts import Host, parse_hosts, slots_of

_DESCRIPTION = """\
Start a training with its launcher, watch it, and start it again after a failure, on the hosts that are left.
The training goes on from its newest checkpoint; the script writes and reads it.
"""
_EPILOG = """\
examples:
  trainer run -np 2 python train.py
  trainer run -np 4 -H a:2,b:2 --min-np 2 python train.py --epochs 90
  trainer run @options.txt python train.py     # with the options that are in a file

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
        "say which rank the others wait for, and restart, after S seconds; 0: never (540)",
    ),
    ("--wait-for-hosts", "wait_for_hosts_s", "with too few hosts, wait S seconds for one to come back (%(default).0f)"),
)
"""Options with a number, none of which may be negative: each with its field of `Options`, and its help."""


Streams = tuple[int | None, int | None, int | None]
"""Standard input, output and error as `subprocess.Popen` takes them."""


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
    hang_timeout_s: float | None = None
    name: str = "train"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the job beside this process's own."""
    streams: Streams = (None, None, None)

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
        usage="trainer run [@FILE] -np N [-H HOST:SLOTS,…] [options] COMMAND …",
    )
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
    for option, name, text in _NUMBERS:
        kind, metavar = (float, "S") if name.endswith("_s") else (int, "N")
        default = getattr(Options, name, None)
        group.add_argument(option, dest=name, type=kind, metavar=metavar, default=default, help=text)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of a command with subcommands, whose errors are one line."""
    return _Parser(prog=prog, description="Runs trainings on several processes and hosts.", allow_abbrev=False)


def parse(arguments: Sequence[str], parser: argparse.ArgumentParser) -> Options:
    """Return the checked options of `trainer run`.

    Args:
        arguments: behind "run". If the first is @FILE, the words in that file take its place, split as by a shell.
        parser: which `add_parser` has returned.

    Raises:
        ConfigError: a value is not valid, there is no command, or the file cannot be read.
    """
    return to_options(parser.parse_args(_from_file(arguments)))


def _from_file(arguments: Sequence[str]) -> Sequence[str]:
    # argparse's fromfile_prefix_chars would also replace words of the command that the ranks run.
    if not arguments or not arguments[0].startswith("@"):
        return arguments
    try:
        return [*shlex.split(Path(arguments[0][1:]).read_text(), comments=True), *arguments[1:]]
    except (OSError, ValueError) as error:  # ValueError: bytes that are no text, or an open quote
        raise ConfigError(f"{arguments[0]} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def to_options(parsed: argparse.Namespace) -> Options:
    """Return the checked options.

    Raises:
        ConfigError: a value is not valid, or there is no command.
    """
    numbers = {option: getattr(parsed, name) for option, name, _ in _NUMBERS if option != "--min-np"}
    hosts = check_job(parsed.ranks, parsed.hosts, parsed.min_ranks, numbers, ("-np", "-H", "--min-np"))
    command = to_command(parsed.command)
    if not command:
        raise ConfigError("there is no command to start; put it at the end, as in trainer run -np 2 python train.py")
    if problem := refuse_launcher(command, "trainer run"):
        raise ConfigError(problem)
    name = parsed.name or name_of(command)
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*", name):
        raise ConfigError(f"--name is {name!r}; valid are letters, digits, '.', '_' and '-'")
    min_ranks = parsed.ranks if parsed.min_ranks is None else parsed.min_ranks
    derived = {"hosts": hosts, "min_ranks": min_ranks, "command": command, "name": name}
    given = {key: value for key, value in vars(parsed).items() if key in Options.__dataclass_fields__}
    return Options(**{**given, **derived})


def check_job(
    ranks: int | None,
    hosts: str | None,
    min_ranks: int | None,
    numbers: Mapping[str, float | None],
    names: tuple[str, str, str],
) -> tuple[Host, ...]:
    """Check what `trainer run` and `trainer.launch` are both asked for; return the hosts.

    Args:
        ranks: how many ranks there are to be.
        hosts: hosts and slots; this host where there are none.
        min_ranks: the fewest ranks to go on with, if given.
        numbers: other values, none of which may be negative, by what the caller calls them.
        names: what the caller calls the first three.

    Raises:
        ConfigError: a value is not valid.
    """
    np, at, least = names
    if ranks is None or ranks < 1:
        raise ConfigError(f"{np} is {'missing' if ranks is None else ranks}; valid is a number of at least 1")
    parsed = parse_hosts(hosts, at) if hosts else (Host("localhost", ranks),)
    if slots_of(parsed) < ranks:
        raise ConfigError(f"{np} is {ranks}, and {at} {hosts} has {slots_of(parsed)} slots")
    if min_ranks is not None and not 1 <= min_ranks <= ranks:
        raise ConfigError(f"{least} is {min_ranks}; valid is 1 to {ranks}, which {np} is")
    for name, value in numbers.items():
        if value is not None and not value >= 0:
            raise ConfigError(f"{name} is {value}; valid is a number of at least 0")
    return parsed

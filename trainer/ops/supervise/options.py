"""The command line of `trainer run`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trainer.errors import ConfigError
from trainer.ops.command import name_of, refuse_launcher, to_command
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
        """Where the lock, the job's id and the events are."""
        return Path("runs", self.name)


class _Parser(argparse.ArgumentParser):
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
        "run", help="start a training, and start it again after a failure", description=_DESCRIPTION, epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        usage="trainer run -np N [-H HOST:SLOTS,…] [options] COMMAND …",
    )  # fmt: skip
    _add_job(parser.add_argument_group("the job"))
    _add_failures(parser.add_argument_group("after a failure"))
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of a command with subcommands, whose errors are one line."""
    return _Parser(prog=prog, description="Runs trainings on several processes and hosts.", allow_abbrev=False)


def _add_job(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-np", dest="ranks", type=int, metavar="N", required=True, help="number of ranks")
    group.add_argument("-H", dest="hosts", metavar="HOST:SLOTS,…", help="hosts and their slots (localhost:N)")
    kinds = group.add_mutually_exclusive_group()
    for name, text in (
        ("mpi", "start with horovodrun --mpi"), ("gloo", "start with horovodrun --gloo"),
        ("torchrun", "start with torchrun, on several hosts through ssh"),
    ):  # fmt: skip
        kinds.add_argument(f"--{name}", dest="launcher", action="store_const", const=name, help=text)
    group.add_argument("--name", help="name of the folder runs/NAME (the script's)")


def _add_failures(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--min-np", dest="min_ranks", type=int, metavar="N", help="go on with N ranks at least (-np)")
    group.add_argument(
        "--max-restarts", type=int, default=100, metavar="N", help="give up after N restarts (%(default)s)"
    )
    group.add_argument(
        "--timeout", dest="timeout_s", type=float, default=600.0, metavar="S",
        help="restart when no rank has made progress for S seconds; 0: never (%(default).0f)",
    )  # fmt: skip
    group.add_argument(
        "--hang-timeout", dest="hang_timeout_s", type=float, metavar="S",
        help="say which rank the others wait for, and restart, after S seconds; 0: never (measured, at least 30)",
    )  # fmt: skip
    group.add_argument(
        "--wait-for-hosts", dest="wait_for_hosts_s", type=float, default=600.0, metavar="S",
        help="with too few hosts, wait S seconds for one to come back (%(default).0f)",
    )  # fmt: skip
    group.add_argument(
        "--take-back", action="store_true",
        help="when a host is back, have the ranks save, and start again with it at once",
    )  # fmt: skip


def to_options(parsed: argparse.Namespace) -> Options:
    """Return the checked options.

    Raises:
        ConfigError: a value is not valid, or there is no command.
    """
    ranks = parsed.ranks
    if ranks < 1:
        raise ConfigError(f"-np is {ranks}; valid is a number of at least 1")
    hosts = parse_hosts(parsed.hosts) if parsed.hosts else (Host("localhost", ranks),)
    if slots_of(hosts) < ranks:
        raise ConfigError(f"-np is {ranks}, and -H {parsed.hosts} has {slots_of(hosts)} slots")
    min_ranks = ranks if parsed.min_ranks is None else parsed.min_ranks
    if not 1 <= min_ranks <= ranks:
        raise ConfigError(f"--min-np is {min_ranks}; valid is 1 to {ranks}, which -np is")
    for name in ("max_restarts", "timeout_s", "hang_timeout_s", "wait_for_hosts_s"):
        if getattr(parsed, name) is not None and not getattr(parsed, name) >= 0:
            option = name.removesuffix("_s").replace("_", "-")
            raise ConfigError(f"--{option} is {getattr(parsed, name)}; valid is a number of at least 0")
    command = to_command(parsed.command)
    if not command:
        raise ConfigError("there is no command to start; put it at the end, as in trainer run -np 2 python train.py")
    if problem := refuse_launcher(command, "trainer run"):
        raise ConfigError(problem)
    name = parsed.name or name_of(command)
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*", name):
        raise ConfigError(f"--name is {name!r}; valid are letters, digits, '.', '_' and '-'")
    return Options(
        ranks=ranks, hosts=hosts, command=command, min_ranks=min_ranks, launcher=parsed.launcher or "horovodrun",
        max_restarts=parsed.max_restarts, timeout_s=parsed.timeout_s, wait_for_hosts_s=parsed.wait_for_hosts_s,
        take_back=parsed.take_back, hang_timeout_s=parsed.hang_timeout_s, name=name,
    )  # fmt: skip

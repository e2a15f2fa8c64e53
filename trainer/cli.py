"""The command `trainer`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

from trainer.checkpoint.disk.merge import add_parser as add_merge_parser
from trainer.checkpoint.disk.merge import merge
from trainer.errors import ConfigError, TrainerError
from trainer.ops import environment, requeue, self_test
from trainer.ops.doctor import command as doctor
from trainer.ops.supervise.options import add_parser, make_parser, parse
from trainer.ops.supervise.supervisor import supervise


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. `shtab trainer.cli.get_parser` makes a shell's completion of it."""
    return _parsers()[0]


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of the command line, and that of `trainer run`."""
    parser = make_parser("trainer")
    parser.add_argument("--version", action="version", version=f"trainer {metadata.version('horovod-trainer')}")
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    of_run = add_parser(subparsers)
    doctor.add_parser(subparsers)
    requeue.add_parser(subparsers)
    self_test.add_parser(subparsers)
    environment.add_parser(subparsers)
    add_merge_parser(subparsers)
    return parser, of_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser, of_run = _parsers()
    parsed = parser.parse_args(arguments)
    starts: dict[str, Callable[[], int]] = {
        "run": lambda: supervise(parse(arguments[1:], of_run)),
        "doctor": lambda: doctor.examine(parsed),
        "requeue": lambda: requeue.requeue(parsed),
        "test": lambda: self_test.self_test(parsed),
        "env": environment.print_environment,
        "merge": lambda: merge(parsed.checkpoint, parsed.file),
    }
    try:
        return starts[parsed.subcommand]()
    except TrainerError as error:
        print(f"trainer {parsed.subcommand}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1

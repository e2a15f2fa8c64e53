"""The command `trainer`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata

from trainer.errors import ConfigError, TrainerError
from trainer.ops import environment, merge, requeue
from trainer.ops.command import did_you_mean
from trainer.ops.doctor import command as doctor
from trainer.ops.supervise import options
from trainer.ops.supervise.supervisor import supervise


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. `shtab trainer.cli.get_parser` makes a shell's completion of it."""
    parser = options.make_parser("trainer")
    parser.add_argument("--version", action="version", version=f"trainer {metadata.version('horovod-trainer')}")
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    # Descriptions and epilogs are shown as they are written.
    new = partial(commands.add_parser, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    options.add_parser(new)
    doctor.add_parser(new)
    requeue.add_parser(new)
    help_text = "print what a bug report needs: versions, how they were built, GPUs; no secrets"
    new("env", help=help_text, description=help_text)
    merge.add_parser(new)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit code."""
    words = options.with_file(sys.argv[1:] if arguments is None else arguments)
    words = [*words[1:], "--help"] if words[:1] in ([], ["help"]) else words
    starts: dict[str, Callable[[], int]] = {
        "run": lambda: supervise(options.to_options(parsed)),
        "doctor": lambda: doctor.examine(parsed),
        "requeue": lambda: requeue.requeue(parsed),
        "env": environment.print_environment,
        "merge": lambda: merge.merge(parsed.checkpoint, parsed.file),
    }
    parser, valid = get_parser(), (*starts, "help", "-h", "--help", "--version")
    if words[0] not in valid:
        near = did_you_mean(words[0], valid) or f"; valid are {', '.join(starts)}"
        parser.error(f"there is no command {words[0]!r}{near}")
    parsed = parser.parse_args(words)
    try:
        return starts[parsed.subcommand]()
    except TrainerError as error:
        print(f"trainer {parsed.subcommand}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1

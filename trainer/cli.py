"""The command `trainer`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from trainer.checkpoint.disk.merge import add_parser as add_merge_parser
from trainer.checkpoint.disk.merge import merge
from trainer.errors import ConfigError, TrainerError
from trainer.ops.doctor import options as doctor
from trainer.ops.doctor.examine import examine
from trainer.ops.submit.options import add_parser as add_submit_parser
from trainer.ops.submit.submit import run as submit
from trainer.ops.supervise.options import add_parser, make_parser, to_options
from trainer.ops.supervise.supervisor import supervise


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit code."""
    parser = make_parser("trainer")
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    add_parser(subparsers)
    doctor.add_parser(subparsers)
    add_submit_parser(subparsers)
    add_merge_parser(subparsers)
    parsed = parser.parse_args(arguments)
    try:
        return _run(parsed)
    except TrainerError as error:
        print(f"trainer {parsed.subcommand}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _run(parsed: argparse.Namespace) -> int:
    if parsed.subcommand == "doctor":
        return examine(doctor.to_options(parsed))
    if parsed.subcommand == "submit":
        return submit(parsed.arguments)
    if parsed.subcommand == "merge":
        return merge(parsed.checkpoint, parsed.file)
    return supervise(to_options(parsed))

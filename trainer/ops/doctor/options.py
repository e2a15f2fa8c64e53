"""The command line of `trainer doctor`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from trainer.errors import ConfigError
from trainer.ops.command import script_of, to_command
from trainer.ops.supervise.hosts import Host, parse_hosts

_DESCRIPTION = "Look at hosts, and at the network between them, for what would make a training fail there."
_EPILOG = """\
examples:
  trainer doctor
  trainer doctor -H a:2,b:2
  trainer doctor -H a:2,b:2 python train.py     also compares the script on all hosts; does not start it

exit codes:
  0    nothing was found that makes a job fail; warnings may have been
  1    something will make a job fail
  2    it could not look at everything, or these options are not valid

The first line is the cause of those below it, as far as one finding explains another.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `trainer doctor` was asked for."""

    hosts: tuple[Host, ...]
    script: str = ""
    """The training script, which is compared; empty without one."""
    timeout_s: float = 20.0
    as_json: bool = False
    with_gpus: bool = False


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `doctor` to the subcommands."""
    parser = subparsers.add_parser(
        "doctor",
        help="look at hosts and the network between them",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="trainer doctor [-H HOST:SLOTS,…] [options] [COMMAND …]",
    )
    add = parser.add_argument
    add("-H", dest="hosts", metavar="HOST:SLOTS,…", help="hosts and their slots (localhost:1)")
    add("--json", dest="as_json", action="store_true", help="print one JSON object")
    add("--gpu", dest="with_gpus", action="store_true", help="also look at the GPUs, and sum between two of them")
    limit = "for all of it but the sums of --gpu (%(default).0f)"
    add("--timeout", dest="timeout_s", type=float, default=20.0, metavar="S", help=limit)
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def to_options(parsed: argparse.Namespace) -> Options:
    """Return the checked options.

    Raises:
        ConfigError: a value is not valid.
    """
    if not 5 <= parsed.timeout_s <= 100:
        raise ConfigError(f"--timeout is {parsed.timeout_s:g}; valid is 5 to 100")
    hosts = parse_hosts(parsed.hosts) if parsed.hosts else (Host("localhost", 1),)
    script = script_of(to_command(parsed.command))
    return Options(
        hosts=hosts, script=script, timeout_s=parsed.timeout_s, as_json=parsed.as_json, with_gpus=parsed.with_gpus
    )

"""The command line of `trainer doctor`: collect the facts, draw the conclusions, and print them."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.errors import ConfigError
from trainer.ops.command import script_of, to_command
from trainer.ops.doctor.checks import Facts, Finding, judge
from trainer.ops.doctor.look import look, try_all_reduces
from trainer.ops.doctor.remote.host import PROBLEM
from trainer.ops.supervise.hosts import Host, parse_hosts

_EPILOG = """\
examples:
  trainer doctor
  trainer doctor -H a:2,b:2
  trainer doctor -H a:2,b:2 python train.py
      also compares the script on all hosts; does not start it

exit codes: 0 nothing was found that makes a job fail; 1 something will make a
job fail; 2 it could not look at everything, or these options are not valid
"""
_PREFIX = "trainer doctor: "


def add_parser(new: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `doctor` to the subcommands."""
    parser = new(
        "doctor",
        help="look at hosts and the network between them",
        description="Look at hosts, and at the network between them, for what would make a\ntraining fail there.",
        epilog=_EPILOG,
        usage="trainer doctor [-H HOST:SLOTS,…] [options] [COMMAND …]",
    )
    add = parser.add_argument
    add("-H", dest="hosts", metavar="HOST:SLOTS,…", help="hosts and their slots (localhost:1)")
    add("--gpu", dest="with_gpus", action="store_true", help="also look at the GPUs, and run a small all-reduce")
    add("--timeout", dest="timeout_s", type=float, default=20.0, metavar="S", help="seconds, at most (%(default).0f)")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def examine(options: argparse.Namespace) -> int:
    """Look at all hosts and print the findings; return the exit code."""
    began = time.monotonic()
    if not 5 <= options.timeout_s <= 100:
        raise ConfigError(f"--timeout is {options.timeout_s:g}; valid is 5 to 100")
    hosts = parse_hosts(options.hosts) if options.hosts is not None else (Host("localhost", 1),)
    command = to_command(options.command)
    if command and not (shutil.which(command[0]) or Path(command[0]).is_file()):
        raise ConfigError(f"{command[0]} is neither a program nor a file; hosts are given with -H, as in -H a:2,b:2")
    try:
        facts = look(hosts, script_of(command), options.timeout_s, with_gpus=options.with_gpus)
        findings = judge(facts)
        if options.with_gpus and not _has_problem(findings):
            try_all_reduces(facts)
            findings = judge(facts)
    except KeyboardInterrupt:
        print(f"{_PREFIX}interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    seconds = time.monotonic() - began
    print(as_text(facts, findings, seconds))
    return 1 if _has_problem(findings) else 2 if facts.incomplete else 0


def _has_problem(findings: Sequence[Finding]) -> bool:
    return any(level == PROBLEM for level, _ in findings)


def as_text(facts: Facts, findings: Sequence[Finding], seconds: float) -> str:
    """Return a line for each finding, then one for what is well."""
    lines = [f"{level}: {line}" for level, line in findings]
    lines += [f"NOT LOOKED AT: {text}" for text in facts.incomplete]
    if facts.answering or not lines:
        lines.append(f"{'otherwise' if lines else 'ok'}: {_well(facts)} ({seconds:.1f} s)")
    # Parts of a line come from other hosts: nothing in them may control a terminal.
    return "\n".join(_PREFIX + "".join(c if c.isprintable() else "?" for c in line) for line in lines)


def _well(facts: Facts) -> str:
    parts = [f"login {', '.join(f'{host} {host.login_s:.1f} s' for host in facts.answering)}"]
    rates = [pair["bytes_per_s"] for pair in facts.pairs.values() if "bytes_per_s" in pair]
    if rates:
        parts.append(f"each two hosts {8 * min(rates) / 1e9:.2g} Gbit/s at worst")
    for tried in facts.all_reduces:
        if rate := tried.get("bus_bytes_per_s"):
            parts.append(f"all-reduce between two GPUs of {' and '.join(tried['hosts'])} {rate / 1e9:.3g} GB/s")
    software = facts.answering[0].answer["software"][:3] if facts.answering else ()
    return "; ".join([*parts, ", ".join(f"{title} {value or 'none'}" for title, value, _ in software)])

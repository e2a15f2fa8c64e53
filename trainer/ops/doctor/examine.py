"""`trainer doctor`: its command line; collect the facts, draw the conclusions, and print them."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from trainer.errors import ConfigError
from trainer.ops.command import script_of, to_command
from trainer.ops.doctor.checks import judge
from trainer.ops.doctor.facts import Facts
from trainer.ops.doctor.finding import Finding, Level
from trainer.ops.doctor.look import look
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
_PREFIX = "trainer doctor: "


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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


def examine(options: argparse.Namespace) -> int:
    """Look at all hosts and print the findings; return the exit code.

    Raises:
        ConfigError: a value of the options is not valid, or ssh is not installed.
    """
    began = time.monotonic()
    if not 5 <= options.timeout_s <= 100:
        raise ConfigError(f"--timeout is {options.timeout_s:g}; valid is 5 to 100")
    hosts = parse_hosts(options.hosts) if options.hosts else (Host("localhost", 1),)
    script = script_of(to_command(options.command))
    try:
        facts = look(hosts, script, options.timeout_s, with_gpus=options.with_gpus)
    except KeyboardInterrupt:
        print(f"{_PREFIX}interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    findings = judge(facts)
    seconds = time.monotonic() - began
    print((as_json if options.as_json else as_text)(facts, findings, seconds))
    return exit_code(facts, findings)


def as_text(facts: Facts, findings: Sequence[Finding], seconds: float) -> str:
    """Return a line for each finding, then one for what is well."""
    lines = [f"{finding.level.name}: {finding}" for finding in findings]
    lines += [f"NOT LOOKED AT: {text}" for text in facts.incomplete]
    if not lines:
        lines.append(f"ok: {_well(facts)} ({seconds:.1f} s)")
    elif facts.answering:
        lines.append(f"otherwise: {_well(facts)} ({seconds:.1f} s)")
    return "\n".join(_PREFIX + _printable(line) for line in lines)


def _printable(text: str) -> str:
    """Replace what would control a terminal: parts of a line come from other hosts."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _well(facts: Facts) -> str:
    parts = [f"login {', '.join(f'{host.name} {host.login.seconds:.1f} s' for host in facts.answering)}"]
    rates = [pair.bytes_per_s for pair in facts.pairs.values() if pair.bytes_per_s]
    times = [pair.latency_s for pair in facts.pairs.values() if pair.latency_s]
    if rates and times:
        parts.append(f"each two hosts {8 * min(rates) / 1e9:.2g} Gbit/s and {max(times) * 1e3:.2g} ms at worst")
    for tried in facts.all_reduces:
        if tried.result:
            rate = f"{tried.result['bus_bytes_per_s'] / 1e9:.3g} GB/s"
            parts.append(f"all-reduce between two GPUs of {' and '.join(tried.hosts)} {rate}")
    if versions := next((host.versions for host in facts.hosts if host.versions), None):
        titles = ("Python", "PyTorch", "Horovod", "Open MPI")
        parts.append(", ".join(f"{title} {versions[title] or 'none'}" for title in titles))
    return "; ".join(parts)


def as_json(facts: Facts, findings: Sequence[Finding], seconds: float) -> str:
    """Return findings and facts as one JSON object."""
    value = {
        "findings": [
            asdict(finding) | {"level": finding.level.name.lower(), "cause": finding.cause.name.lower()}
            for finding in findings
        ],
        "not_looked_at": facts.incomplete,
        "hosts": {host.name: asdict(host) for host in facts.hosts},
        "pairs": [{"from": here, "to": there, **asdict(pair)} for (here, there), pair in facts.pairs.items()],
        "all_reduces": [asdict(tried) for tried in facts.all_reduces],
        "seconds": round(seconds, 3),
    }
    return json.dumps(value, indent=1)


def exit_code(facts: Facts, findings: Sequence[Finding]) -> int:
    """Return 1 where a job will fail, 2 where something could not be looked at, else 0."""
    if any(finding.level is Level.PROBLEM for finding in findings):
        return 1
    return 2 if facts.incomplete else 0

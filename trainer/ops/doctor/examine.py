"""Run `trainer doctor`: collect the facts, draw the conclusions, and print them."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trainer.ops.doctor.checks import judge
from trainer.ops.doctor.facts import Facts, HostFacts
from trainer.ops.doctor.finding import Finding, Level
from trainer.ops.doctor.look import look, show_progress
from trainer.ops.doctor.options import Options

_PREFIX = "trainer doctor: "


def examine(options: Options) -> int:
    """Look at all hosts and print the findings; return the exit code.

    Raises:
        ConfigError: ssh is not installed.
    """
    began = time.monotonic()
    try:
        try:
            facts = look(options)
        finally:
            show_progress("")
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
            parts.append(f"all-reduce between two GPUs of {' and '.join(tried.hosts)} {rate} ({tried.transports})")
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
        "hosts": {host.name: _host_as_json(host) for host in facts.hosts},
        "pairs": [{"from": here, "to": there, **asdict(pair)} for (here, there), pair in facts.pairs.items()],
        "all_reduces": [
            {
                "hosts": tried.hosts,
                "transports": tried.transports,
                "result": tried.result or None,
                "outputs": [] if tried.result else tried.outputs,
            }
            for tried in facts.all_reduces
        ],
        "seconds": round(seconds, 3),
    }
    return json.dumps(value, indent=1)


def _host_as_json(host: HostFacts) -> dict[str, Any]:
    told = ("machine", "software", "interfaces", "gpus")
    names = {name: asdict(seen) for name, seen in host.names.items() if name}
    for entry in names.values():
        entry["own"] = entry.pop("source")
    return {
        "slots": host.slots,
        "login_s": host.login.seconds,
        **{question: getattr(host, question) or None for question in told},
        "names": names,
    }


def exit_code(facts: Facts, findings: Sequence[Finding]) -> int:
    """Return 1 where a job will fail, 2 where something could not be looked at, else 0."""
    if any(finding.level is Level.PROBLEM for finding in findings):
        return 1
    return 2 if facts.incomplete else 0

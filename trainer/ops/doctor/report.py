"""What is printed: findings for people, or everything for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from trainer.ops.doctor.facts import Facts
from trainer.ops.doctor.finding import Finding, Level

PREFIX = "trainer doctor: "


def as_text(facts: Facts, findings: Sequence[Finding], seconds: float) -> str:
    """Return a line for each finding, then one for what is well."""
    lines = [f"{finding.level.name}: {finding}" for finding in findings]
    lines += [f"NOT LOOKED AT: {text}" for text in facts.incomplete]
    if not findings and not facts.incomplete:
        lines.append(f"ok: {_well(facts)} ({seconds:.1f} s)")
    elif facts.machines:
        lines.append(f"otherwise: {_well(facts)} ({seconds:.1f} s)")
    return "\n".join(PREFIX + _printable(line) for line in lines)


def _printable(text: str) -> str:
    """Replace what would control a terminal: parts of a line come from other hosts."""
    return "".join(one if one.isprintable() else "?" for one in text)


def _well(facts: Facts) -> str:
    hosts = ", ".join(f"{host.name} {facts.logins[host.name].seconds:.1f} s" for host in facts.answering)
    parts = [f"login {hosts}"]
    rates = [pair.bytes_per_s for pair in facts.pairs.values() if pair.bytes_per_s]
    times = [pair.latency_s for pair in facts.pairs.values() if pair.latency_s]
    if rates and times:
        parts.append(f"each two hosts {8 * min(rates) / 1e9:.2g} Gbit/s and {max(times) * 1e3:.2g} ms at worst")
    for one in facts.all_reduces:
        if one.result:
            rate = f"{one.result['bus_bytes_per_s'] / 1e9:.3g} GB/s"
            parts.append(f"all-reduce between two GPUs of {' and '.join(one.hosts)} {rate} ({one.transports})")
    for software in list(facts.software.values())[:1]:
        versions = ("Python", "PyTorch", "Horovod", "Open MPI")
        parts.append(", ".join(f"{name} {software['versions'][name] or 'none'}" for name in versions))
    return "; ".join(parts)


def as_json(facts: Facts, findings: Sequence[Finding], seconds: float) -> str:
    """Return findings and facts as one JSON object."""
    value = {
        "findings": [
            {"level": one.level.name.lower(), "cause": one.cause.name.lower(), "hosts": one.hosts, "text": one.text,
             "remedy": one.remedy}
            for one in findings
        ],
        "not_looked_at": facts.incomplete,
        "hosts": {
            host.name: {
                "slots": host.slots, "login_s": facts.logins[host.name].seconds,
                "machine": facts.machines.get(host.name), "software": facts.software.get(host.name),
                "interfaces": facts.interfaces.get(host.name), "gpus": facts.gpus.get(host.name),
                "names": {name: asdict(seen) for name, seen in facts.names.get(host.name, {}).items() if name},
            }
            for host in facts.hosts
        },
        "pairs": [{"from": one, "to": other, **asdict(pair)} for (one, other), pair in facts.pairs.items()],
        "all_reduces": [
            {"hosts": one.hosts, "transports": one.transports, "result": one.result or None,
             "outputs": [] if one.result else one.outputs}
            for one in facts.all_reduces
        ],
        "seconds": round(seconds, 3),
    }  # fmt: skip
    return json.dumps(value, indent=1)


def exit_code(facts: Facts, findings: Sequence[Finding]) -> int:
    """Return 1 where a job will fail, 2 where something could not be looked at, else 0."""
    if any(finding.level is Level.PROBLEM for finding in findings):
        return 1
    return 2 if facts.incomplete else 0

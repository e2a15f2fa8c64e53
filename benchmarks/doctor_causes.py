"""Causes for `trainer doctor`: how each is made on two containers, undone, and what the first line has to say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.doctor_nodes import Nodes

Place = Literal["shell", "user", "net", "mount", "uts", "machine"]
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Step:
    """A script, and the script that undoes it.

    They run on the node as root ("shell") or as its user, in one of the node's namespaces ("net", "mount", "uts") with
    this machine's programs, or on this machine.
    `{a}` and `{b}` stand for the nodes' addresses, `{container}` for the node's name, `{process}` for its first
    process, `{root}` for the checkout.
    """

    place: Place
    node: str
    do: str = ""
    undo: str = ""


@dataclass(frozen=True)
class Cause:
    """Something that goes wrong."""

    group: str
    title: str
    steps: tuple[Step, ...]
    first_line: str
    """A regular expression that the first line has to match."""
    level: Literal["PROBLEM", "WARNING"] = "PROBLEM"
    hosts: str = "a:2,b:2"
    node: str = "a"
    command: tuple[str, ...] = ()
    folder: str = "/trainer"
    settings: Mapping[str, object] = field(default_factory=dict)
    """Node b's in compose, for which it is made anew."""


def hosts_line(node: str, *lines: str) -> Step:
    """Return the step that puts lines into a node's /etc/hosts, before all others."""
    text = "".join(f"{line}\\n" for line in lines)
    change = f"cp /etc/hosts /tmp/hosts.old; {{{{ printf '{text}'; cat /tmp/hosts.old; }}}} > /tmp/hosts.new; "
    return Step("shell", node, change + "cat /tmp/hosts.new > /etc/hosts", "cat /tmp/hosts.old > /etc/hosts")


def own_name(node: str, address: str) -> Step:
    """Return the step that gives a node's own name an address."""
    change = f"cp /etc/hosts /tmp/hosts.old; sed '/\\t{node}$/d' /tmp/hosts.old > /tmp/hosts.new; "
    change += f"printf '{address} {node}\\n' >> /tmp/hosts.new; cat /tmp/hosts.new > /etc/hosts"
    return Step("shell", node, change, "cat /tmp/hosts.old > /etc/hosts")


def bashrc(line: str) -> Step:
    """Return the step that puts a line at the top of node b's .bashrc, which sshd's shell reads."""
    change = f"cp ~/.bashrc /tmp/bashrc.old; {{{{ echo '{line}'; cat /tmp/bashrc.old; }}}} > ~/.bashrc"
    return Step("user", "b", change, "cp /tmp/bashrc.old ~/.bashrc")


def firewall(node: str, rule: str) -> Step:
    """Return the step that adds a rule to a node's firewall."""
    return Step("net", node, f"iptables -A {rule}", f"iptables -D {rule}")


def moved(path: str) -> Step:
    """Return the step that takes a file or folder away on node b."""
    return Step("shell", "b", f"mv {path} {path}.away", f"mv {path}.away {path}")


def edited(path: str, change: str) -> Step:
    """Return the step that edits a file on node b with sed."""
    file = f"f=$(echo {path})"
    return Step("shell", "b", f"{file}; cp -p $f $f.old; sed -i '{change}' $f", f"{file}; mv $f.old $f")


@contextmanager
def made(nodes: Nodes, cause: Cause) -> Iterator[None]:
    """Make the cause, and undo it afterwards."""
    nodes.up(cause.settings)
    done: list[Step] = []
    try:
        for step in cause.steps:
            done.append(step)
            _run(nodes, step, step.do)
        yield
    finally:
        for step in reversed(done):
            _run(nodes, step, step.undo)


def _run(nodes: Nodes, step: Step, script: str) -> None:
    if not script:
        return
    script = script.format(
        a=nodes.address("a"), b=nodes.address("b"), container=nodes.container(step.node),
        process=nodes.process(step.node), root=ROOT,
    )  # fmt: skip
    if step.place in ("shell", "user"):
        nodes.shell(step.node, script, "0" if step.place == "shell" else "1000")
    elif step.place == "machine":
        nodes.here("sh", "-ec", script)
    else:
        nodes.inside(step.node, step.place, script)

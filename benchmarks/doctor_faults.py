"""Makes causes of failures on two containers, and checks that `trainer doctor` names each in its first line.

    docker build -t trainer:cpu .
    python benchmarks/doctor_faults.py                 # a table in Markdown
    python benchmarks/doctor_faults.py --healthy 100   # a healthy cluster, on which nothing may be found

The containers are this program's own, and are removed. Firewalls, bridges and mounts are changed from outside, which
takes root on the machine. The exit code is 1 when less than 95 % of the first lines are right, when a cause leaves the
doctor silent, when it takes longer than 20 s, or when something is found on a healthy cluster.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from dataclasses import dataclass

from benchmarks.doctor_catalogue import CAUSES
from benchmarks.doctor_causes import Cause, made
from benchmarks.doctor_nodes import Nodes
from trainer.watch.failure import report_failures

LEAST_SHARE = 0.95
MOST_S = 20.0
MOST_LINES = 3
"""What follows from a cause is left out."""
_PREFIX = "trainer doctor: "
_FINDINGS = ("PROBLEM: ", "WARNING: ")


@dataclass(frozen=True)
class Trial:
    """What the doctor said of a cause."""

    cause: Cause
    first_line: str
    """Empty where it was silent."""
    lines: int
    """Number of findings."""
    code: int
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether the first line names the cause at its level, with its exit code, within the time and few lines."""
        level, _, text = self.first_line.partition(": ")
        named = level == self.cause.level and re.search(self.cause.first_line, text) is not None
        expected = 1 if self.cause.level == "PROBLEM" else 0
        return named and self.code == expected and self.seconds <= MOST_S and self.lines <= MOST_LINES


def main() -> int:
    report_failures()
    options = _parse_options()
    nodes = Nodes(options.project, options.file)
    try:
        return _check_healthy(nodes, options.healthy) if options.healthy else _check_causes(nodes, options.only)
    finally:
        nodes.down()


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--healthy", type=int, metavar="N", help="look N times at a healthy cluster instead")
    add("--only", default="", metavar="TEXT", help="only causes with this in their group or title")
    add("--file", action="append", default=[], help="compose files (docker-compose.yml)")
    add("--project", default="trainer-doctor", metavar="NAME", help="of compose (default: %(default)s)")
    return parser.parse_args()


def try_cause(nodes: Nodes, cause: Cause) -> Trial:
    """Make a cause, run the doctor, undo the cause."""
    with made(nodes, cause):
        began = time.monotonic()
        done = nodes.doctor(cause.node, "-H", cause.hosts, *cause.command, folder=cause.folder)
        seconds = time.monotonic() - began
    lines = [line.removeprefix(_PREFIX) for line in done.stdout.splitlines()]
    findings = [line for line in lines if line.startswith(_FINDINGS)]
    if not lines:
        print(done.stderr, file=sys.stderr)
    return Trial(cause, findings[0] if findings else "", len(findings), done.returncode, seconds)


def _check_causes(nodes: Nodes, only: str) -> int:
    trials = []
    for cause in CAUSES:
        if only in cause.group or only in cause.title:
            trials.append(try_cause(nodes, cause))
            _note(trials[-1])
    right = sum(trial.is_right for trial in trials)
    silent = [trial.cause.title for trial in trials if not trial.first_line]
    print(render(trials))
    print(f"\n{right} of {len(trials)} first lines are right; {len(silent)} causes left the doctor silent.")
    return int(right < LEAST_SHARE * len(trials) or bool(silent))


def _note(trial: Trial) -> None:
    how = "right" if trial.is_right else "WRONG"
    how += f" ({trial.seconds:.1f} s, {trial.lines} findings, exit code {trial.code})"
    print(f"{how}: {trial.cause.title}: {trial.first_line or 'silent'}", file=sys.stderr, flush=True)


def render(trials: list[Trial]) -> str:
    """Return the table of docs/measured-failures.md."""
    rows = ["| | cause | first line | s | right |", "|---|---|---|---|---|"]
    for trial in trials:
        text = trial.first_line.partition("; ")[0].replace("|", "\\|")
        mark = "yes" if trial.is_right else "**no**"
        rows.append(f"| {trial.cause.group} | {trial.cause.title} | `{text}` | {trial.seconds:.1f} | {mark} |")
    return "\n".join(rows)


def _check_healthy(nodes: Nodes, number: int) -> int:
    nodes.up({})
    found, seconds = [], []
    for _ in range(number):
        began = time.monotonic()
        done = nodes.doctor("a", "-H", "a:2,b:2", "python", "examples/mnist.py")
        seconds.append(time.monotonic() - began)
        if done.returncode or not done.stdout.startswith(f"{_PREFIX}ok: "):
            found.append(done.stdout + done.stderr)
            print(found[-1], file=sys.stderr, flush=True)
    print(
        f"{number} runs on a healthy cluster: {len(found)} with a finding; {statistics.median(seconds):.1f} s each, "
        f"{max(seconds):.1f} s at most"
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

"""Checkpoints on a disk that fails: which one is found afterwards, as a table in Markdown.

    python benchmarks/commit_faults.py

Checkpoints 1 and 2 are there. A process saves 3 and removes 1, while it is killed, power is lost, or a call fails:
at each call that changes a file. Then 3 has to be found if its `commit` had returned, and else 2 or 3. After each
trial, the next save has to succeed and to leave nothing but two checkpoints. A trial in which one of this was not so
counts as lost.

It needs Linux and a C compiler, and takes a few minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.faults.trials import Outcome, run
from trainer.watch.failure import report_failures


def table(outcomes: Iterable[Outcome]) -> str:
    """Format the outcomes, a kind of fault per row."""
    rows: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault(outcome.fault, []).append(outcome)
    lines = ["| fault | trials | newest kept | older used | lost |", "|---|---|---|---|---|"]
    for fault, found in rows.items():
        lost = sum(bool(outcome.problems) for outcome in found)
        kept = sum(outcome.is_new and not outcome.problems for outcome in found)
        lines.append(f"| {fault} | {len(found):,} | {kept:,} | {len(found) - kept - lost:,} | {lost:,} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    report_failures()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.parse_args(arguments)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="trainer-commit-") as folder:
        for outcome in run(Path(folder)):
            outcomes.append(outcome)
            for problem in outcome.problems:
                print(f"{outcome.fault}, {outcome.detail}: {problem}", file=sys.stderr)
    print(table(outcomes))
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())

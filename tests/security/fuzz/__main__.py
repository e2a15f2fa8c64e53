"""Sends inputs to all targets, and prints a table.

    python -m tests.security.fuzz [--inputs 100000] [--only TEXT] [--folder FOLDER] [--seed 1]

The exit code is 1 where something was found: an error that is not documented, more than a second or 64 MB for an input
of up to 4 KB, or a process that has ended. The folder gets the inputs that have found it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.security.fuzz.targets import TARGETS

_HEAD = "| target | inputs | seconds | inputs/s | MB | findings |"


def main() -> int:
    """Fuzz the targets one after another; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.security.fuzz", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="for each target (%(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="the targets whose name has this in it")
    parser.add_argument("--folder", type=Path, help="for inputs that have found something (a temporary one)")
    parser.add_argument("--seed", default="1", help="of the mutations (%(default)s)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="trainer-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    names = [target.name for target in TARGETS if options.only in target.name]
    print(f"{_HEAD}\n|{'---|' * _HEAD.count('| ')}", flush=True)
    findings = [finding for name in names for finding in _fuzz(name, options.inputs, folder, options.seed)]
    print("\n".join(findings) or "nothing was found")
    return 1 if findings else 0


def _fuzz(name: str, inputs: int, folder: Path, seed: str) -> list[str]:
    """Fuzz one target in a process of its own; print its row, and return what was found."""
    report = folder / f"{name.replace(' ', '-').replace('/', '-')}.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.security.fuzz.driver", name, str(inputs), str(report), seed]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if not report.exists():
        last = "\n".join(done.stderr.splitlines()[-20:])
        print(f"| {name} | - | - | - | - | ended |", flush=True)
        return [f"{name}: the process has ended with code {done.returncode}\n{last}"]
    result = json.loads(report.read_text())
    count, seconds, found = result["inputs"], result["seconds"], result["findings"]
    rate = f"{count / seconds:,.0f}"
    print(f"| {name} | {count:,} | {seconds:.0f} | {rate} | {result['peak_mb']:.0f} | {len(found)} |", flush=True)
    return [f"{name}: {finding}" for finding in found]


if __name__ == "__main__":
    sys.exit(main())

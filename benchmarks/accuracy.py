"""Trains the default recipe of examples/mnist.py with several seeds and numbers of processes; tables the accuracy.

python benchmarks/accuracy.py --data-dir data

Exits with code 1 when a run failed or a test accuracy is below 99 %.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launching import launch, run
from benchmarks.machine import describe_machine
from benchmarks.workloads import mnist_folder
from measuring import INTERRUPTS, interrupt_on, parser_of
from trainer.watch.failure import report_failures

TARGET_PERCENT = 99.0
_TIMEOUT_S = 900.0
_LAST_LINE = re.compile(
    r"^test accuracy (?P<percent>[\d.]+) % \(evaluated (?P<evaluated>\d+)/(?P<samples>\d+)\)$", re.M
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one training."""

    np: int
    """Processes."""
    seed: int
    percent: float | None
    """Test accuracy; None where none was printed."""
    problem: str | None = None


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `--help` shows it."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="(default: %(default)s)")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], metavar="N", help="(default: 0 to 4)")
    add("--np", nargs="+", type=int, default=[1, 2, 4], metavar="N", help="(default: 1 2 4)")
    add("--epochs", type=int, default=1, metavar="N", help="(default: %(default)s)")
    return parser.parse_args(arguments)


def train(np: int, seed: int, *, epochs: int, data_dir: Path) -> Outcome:
    """Train once; a failure is described in the outcome."""
    options = ["--epochs", str(epochs), "--seed", str(seed), "--data-dir", str(data_dir)]
    command = [*launch("examples/mnist.py", np), *options, "--dataset", "mnist", "--output", "none"]
    finished = run(command, timeout_s=_TIMEOUT_S)
    percent, problem = read_accuracy(finished.stdout)
    return Outcome(np=np, seed=seed, percent=percent, problem=finished.problem or problem)


def read_accuracy(output: str) -> tuple[float | None, str | None]:
    """Return the test accuracy in percent, and what is wrong with it."""
    found = _LAST_LINE.search(output)
    if found is None:
        return None, "it printed no test accuracy"
    if found["evaluated"] != found["samples"]:
        return None, f"it was tested on {found['evaluated']} of {found['samples']} samples"
    return float(found["percent"]), None


def render(outcomes: Sequence[Outcome]) -> str:
    """Return a table: a row for each number of processes, a column for each seed, and the least of the row."""
    seeds = sorted({outcome.seed for outcome in outcomes})
    lines = [f"| processes | {' | '.join(f'seed {seed}' for seed in seeds)} | least |", "|---" * (len(seeds) + 2) + "|"]
    for np in sorted({outcome.np for outcome in outcomes}):
        row = {outcome.seed: outcome.percent or math.nan for outcome in outcomes if outcome.np == np}
        lines.append(f"| {np} | {' | '.join(f'{row[seed]:.2f}' for seed in seeds)} | {min(row.values()):.2f} |")
    return "\n".join(lines)


def main() -> int:
    report_failures()
    args = parse_args()
    interrupt_on(*INTERRUPTS)
    data_dir = args.data_dir.resolve()
    mnist_folder(data_dir)
    outcomes: list[Outcome] = []
    for seed in dict.fromkeys(args.seeds):
        for np in dict.fromkeys(args.np):
            outcomes.append(train(np, seed, epochs=args.epochs, data_dir=data_dir))
            print(f"accuracy: {outcomes[-1]}", file=sys.stderr, flush=True)
    print(", ".join(f"{name} {fact}" for name, fact in describe_machine().items()))
    print(f"test accuracy in percent after {args.epochs} epochs\n\n{render(outcomes)}")
    failed = [one for one in outcomes if one.problem or (one.percent or 0.0) < TARGET_PERCENT]
    print("\n".join(f"FAILED (below {TARGET_PERCENT:g} %, or ended early): {one}" for one in failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

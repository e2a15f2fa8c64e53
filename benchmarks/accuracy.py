"""Trains the default recipe of examples/mnist.py with several seeds and numbers of processes; tables the accuracy.

python benchmarks/accuracy.py --data-dir data

Exits with code 1 when a run failed or a test accuracy is below 99 %.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.launching import launch, run
from benchmarks.machine import describe_machine
from benchmarks.workloads import mnist_folder
from trainer.files import check_writable
from trainer.ops.processes import INTERRUPTS, interrupt_on
from trainer.watch.failure import report_failures

TARGET_PERCENT = 99.0
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
    """Test accuracy; None when the run failed."""
    seconds: float
    """Seconds of the whole command, with start and evaluation."""
    problem: str | None = None


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `--help` shows it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], metavar="N", help="(default: 0 to 4)")
    parser.add_argument("--np", nargs="+", type=int, default=[1, 2, 4], metavar="N", help="(default: 1 2 4)")
    parser.add_argument("--epochs", type=int, default=1, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--json", type=Path, default=Path("accuracy.json"), metavar="FILE", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=float, default=900.0, metavar="S", help="of one run, seconds (default: %(default)s)"
    )
    args = parser.parse_args(arguments)
    if min(args.np) < 1 or min(args.seeds) < 0 or args.epochs < 1:
        parser.error("--np and --epochs must be at least 1, --seeds not negative")
    return args


def train(np: int, seed: int, *, epochs: int, data_dir: Path, timeout_s: float) -> Outcome:
    """Train once; a failure is described in the outcome."""
    options = ["--epochs", str(epochs), "--seed", str(seed), "--data-dir", str(data_dir)]
    finished = run(
        [*launch("examples/mnist.py", np), *options, "--dataset", "mnist", "--output", "none"], timeout_s=timeout_s
    )
    percent, problem = read_accuracy(finished.stdout)
    problem = finished.problem or problem
    return Outcome(np=np, seed=seed, percent=None if problem else percent, seconds=finished.seconds, problem=problem)


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
    lines = ["processes  " + "".join(f"{f'seed {seed}':>9}" for seed in seeds) + f"{'least':>9}"]
    for np in sorted({outcome.np for outcome in outcomes}):
        row = {outcome.seed: outcome.percent for outcome in outcomes if outcome.np == np}
        cells = [row.get(seed) for seed in seeds]
        known = [percent for percent in cells if percent is not None]
        cells.append(min(known, default=None))
        lines.append(f"{np:<11}" + "".join("   FAILED" if cell is None else f"{cell:9.2f}" for cell in cells))
    return "\n".join(lines)


def summarise(outcomes: Sequence[Outcome], epochs: int, json_file: Path) -> bool:
    """Write the JSON and print the table; return whether every accuracy reaches the target."""
    machine = describe_machine()
    content = {"machine": machine, "epochs": epochs, "runs": [asdict(outcome) for outcome in outcomes]}
    json_file.write_text(json.dumps(content, indent=2) + "\n")
    print(", ".join(f"{name} {fact}" for name, fact in machine.items()))
    print(f"test accuracy in percent after {epochs} epochs\n\n{render(outcomes)}")
    below = [outcome for outcome in outcomes if outcome.percent is None or outcome.percent < TARGET_PERCENT]
    for outcome in below:
        verdict = outcome.problem or f"{outcome.percent:.2f} % is below {TARGET_PERCENT:g} %"
        print(f"FAILED: np {outcome.np}, seed {outcome.seed}: {verdict}")
    return not below


def main() -> int:
    report_failures()
    args = parse_args()
    interrupt_on(*INTERRUPTS)
    data_dir = args.data_dir.resolve()
    mnist_folder(data_dir)
    check_writable(args.json)
    outcomes: list[Outcome] = []
    for seed in dict.fromkeys(args.seeds):
        for np in dict.fromkeys(args.np):
            outcome = train(np, seed, epochs=args.epochs, data_dir=data_dir, timeout_s=args.timeout)
            outcomes.append(outcome)
            verdict = outcome.problem or f"{outcome.percent:.2f} %"
            print(f"accuracy: np {np}, seed {seed}: {verdict} ({outcome.seconds:.0f} s)", file=sys.stderr, flush=True)
    return 0 if summarise(outcomes, args.epochs, args.json) else 1


if __name__ == "__main__":
    sys.exit(main())

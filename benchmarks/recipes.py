"""Times examples/mnist.py with several recipes until it has a test accuracy of 99.0 %, and tables what each is worth.

    python -m benchmarks.recipes --data-dir data --seeds 0 1 2 3 4

The recipes take turns within a seed. The seconds are those of training, up to the first epoch that ends with the
accuracy; not those of the start and of the evaluations. Exits with code 1 when a run failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import trainer
from benchmarks.launching import launch, run
from benchmarks.machine import describe_machine
from benchmarks.workloads import mnist_folder
from trainer.ops.processes import INTERRUPTS, interrupt_on
from trainer.watch.failure import report_failures

TARGET_PERCENT = 99.0
RECIPES: Mapping[str, str] = {
    "default": "",
    "a batch of 64 per rank": "--batch-size 64",
    "without warm-up": "--warmup-epochs 0",
    "compiled": "--compile",
    "bf16": "--precision bf16",
    "channels first": "--no-channels-last",
    "five epochs": "--epochs 5",
}
"""Options of examples/mnist.py."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one training."""

    seconds: float | None
    """To the accuracy; None where it was not reached."""
    total_s: float
    """Of the whole training."""
    percent: float
    """Test accuracy at the end."""


def main() -> int:
    report_failures()
    options = _parse_args()
    interrupt_on(*INTERRUPTS)
    data_dir = options.data_dir.resolve()
    mnist_folder(data_dir)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in options.only}
    for seed in options.seeds:
        for name in options.only:
            outcome = _train(RECIPES[name], seed, options.np, data_dir)
            outcomes[name].append(outcome)
            print(f"{name}, seed {seed}: {outcome}", file=sys.stderr, flush=True)
    print(", ".join(f"{name} {fact}" for name, fact in describe_machine().items()))
    print(render(outcomes))
    return 0


def _train(recipe: str, seed: int, ranks: int, data_dir: Path) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="trainer-recipe-") as folder:
        output = Path(folder, "run")
        command = [*launch("examples/mnist.py", ranks), *recipe.split(), "--seed", str(seed)]
        command += ["--dataset", "mnist", "--data-dir", str(data_dir), "--output", str(output)]
        finished = run(command, timeout_s=600.0)
        if finished.problem:
            raise trainer.TrainerError(f"{recipe or 'the default'}, seed {seed}: {finished.problem}")
        return read_outcome((output / "epochs.jsonl").read_text())


def read_outcome(lines: str) -> Outcome:
    """Return what the record of a run's epochs says."""
    seconds, reached, percent = 0.0, None, 0.0
    for epoch in map(json.loads, lines.splitlines()):
        seconds += epoch["seconds"]
        percent = 100 * epoch["validation"]["metrics"]["accuracy"]
        if reached is None and percent >= TARGET_PERCENT:
            reached = seconds
    return Outcome(seconds=reached, total_s=seconds, percent=percent)


def render(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """Return a table with a row for each recipe: medians, and least to greatest."""
    lines = [
        f"| recipe | options | reached {TARGET_PERCENT} % | s to it | s in all | accuracy at the end, % |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in outcomes.items():
        reached = [one.seconds for one in found if one.seconds is not None]
        to_it = _spread(reached, 1) if reached else ""
        options = f"`{RECIPES[name]}`" if RECIPES[name] else ""
        cells = [name, options, f"{len(reached)} of {len(found)}", to_it]
        cells += [_spread([one.total_s for one in found], 1), _spread([one.percent for one in found], 2)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float], digits: int) -> str:
    median, least, most = (f"{one:.{digits}f}" for one in (statistics.median(values), min(values), max(values)))
    return f"{median} ({least} – {most})"


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], metavar="N", help="(default: 0 to 4)")
    parser.add_argument("--np", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument(
        "--only", nargs="+", choices=tuple(RECIPES), default=tuple(RECIPES), metavar="NAME", help="recipes (all)"
    )
    options = parser.parse_args()
    if options.np < 1 or min(options.seeds) < 0:
        parser.error("--np must be at least 1, --seeds not negative")
    return options


if __name__ == "__main__":
    sys.exit(main())

"""Counts the updates that a training takes to an accuracy, with each way to send less between ranks.

    python benchmarks/updates_to.py --data-dir data          # an hour on two cores

Every setting trains the 25 MB network of examples/mnist.py with several seeds, on four ranks of this host under ddp, at
a global batch of 400. The test accuracy is measured every 16 updates. How fast the link is changes no weight: so the
updates, times the seconds of an update on a slow link (benchmarks/shaped_link.py), are the time to that accuracy there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trainer
from benchmarks.launching import launch, run
from benchmarks.machine import describe_machine
from benchmarks.time_to_job import TASKS, parse_settings, train
from benchmarks.workloads import mnist_folder
from trainer.ops.processes import INTERRUPTS, interrupt_on
from trainer.watch.failure import report_failures

RANKS, UPDATES = 4, 150
"""Processes, and updates of an epoch."""
SETTINGS = (
    "compression=none", "compression=powersgd:4", "compression=powersgd:8", "sync_every=8",
    "compression=powersgd:16,sync_every=4,full_updates=2",
)  # fmt: skip
_RESULT = re.compile(r"^updates-to: (.*)$", re.M)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one training."""

    updates: int | None
    """To the accuracy; None where it was not reached."""
    percent: float
    """Test accuracy at the end."""


def main() -> int:
    report_failures()
    options = _parse_args()
    if options.seed_of_job is not None:
        _train(parse_settings(options.settings[0]), options)
        return 0
    interrupt_on(*INTERRUPTS)
    mnist_folder(options.data_dir)
    outcomes: dict[str, list[Outcome]] = {setting: [] for setting in options.settings}
    for seed in options.seeds:
        for setting in options.settings:
            outcome = _launch(setting, seed, options)
            outcomes[setting].append(outcome)
            print(f"{setting}, seed {seed}: {outcome}", file=sys.stderr, flush=True)
    print(", ".join(f"{name} {fact}" for name, fact in describe_machine().items()))
    print(render(outcomes, options.to))
    return 0


def render(outcomes: dict[str, list[Outcome]], to: float) -> str:
    """Return a table with the median and the range of each setting's updates and accuracies."""
    lines = [f"| setting | updates to {to:g} % | accuracy at the end, % | missed |", "|---|---|---|---|"]
    for setting, found in outcomes.items():
        updates = [one.updates for one in found if one.updates is not None]
        reached = f"{statistics.median(updates):.0f} ({min(updates)}–{max(updates)})" if updates else ""
        percents = [one.percent for one in found]
        end = f"{statistics.mean(percents):.2f} ({min(percents):.2f}–{max(percents):.2f})"
        lines.append(f"| {setting} | {reached} | {end} | {len(found) - len(updates)} |")
    return "\n".join(lines)


def _launch(setting: str, seed: int, options: argparse.Namespace) -> Outcome:
    command = launch(str(Path(__file__).resolve()), RANKS, "torchrun")
    command += ["--data-dir", str(options.data_dir.resolve()), "--settings", setting, "--seed-of-job", str(seed)]
    command += ["--epochs", str(options.epochs), "--to", str(options.to)]
    finished = run(command, timeout_s=options.timeout, threads=1)
    found = _RESULT.search(finished.stdout)
    if finished.problem or found is None:
        raise trainer.TrainerError(f"{setting}, seed {seed}: {finished.problem or finished.last_line}")
    return Outcome(**json.loads(found[1]))


def _train(settings: dict[str, Any], options: argparse.Namespace) -> None:
    """Train as a rank of the job; rank 0 prints the outcome."""
    handle = trainer.init("ddp", seed=options.seed_of_job, **settings)
    task = dataclasses.replace(TASKS["mnist"], updates=options.epochs * UPDATES)
    result = train(task, handle, options.data_dir, seed=options.seed_of_job, target=options.to, ends_at_target=False)
    handle.print(f"updates-to: {json.dumps({'updates': result.reached, 'percent': result.score})}")
    handle.close()


def _parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="of MNIST (default: %(default)s)")
    add("--settings", nargs="+", default=list(SETTINGS), help="of trainer.init (default: %(default)s)")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], metavar="N", help="(default: 0 to 4)")
    add("--epochs", type=int, default=3, metavar="N", help=f"of {UPDATES} updates (default: %(default)s)")
    add("--to", type=float, default=98.0, metavar="PERCENT", help="(default: %(default)s)")
    add("--timeout", type=float, default=900.0, metavar="S", help="of one training (default: %(default)s)")
    add("--seed-of-job", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Counts the updates that a training takes to an accuracy, with each way to send less between ranks.

    python benchmarks/updates_to.py --data-dir data          # an hour on two cores

Every setting trains the 25 MB network of examples/mnist.py with several seeds, on four ranks of this host under ddp, at
a global batch of 400. The test accuracy is measured every 16 updates. How fast the link is changes no weight: so the
updates, times the seconds of an update on a slow link (benchmarks/shaped_link.py), are the time to that accuracy there.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import trainer
from benchmarks.common import mnist_folder
from benchmarks.launching import launch, run
from benchmarks.machine import describe_machine
from examples.datasets import load_dataset
from examples.mnist import LargeNetwork
from trainer.launch.failure import report_failures
from trainer.launch.processes import INTERRUPTS, interrupt_on

RANKS, BATCH, EVERY, WARM_UP = 4, 100, 16, 20
SETTINGS = (
    "compression=none", "compression=powersgd:4", "compression=powersgd:8", "sync_every=8",
    "sync_every=4,sync_overlap=true", "sync_every=8,sync_overlap=true",
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
        train(_settings_from(options.settings[0]), options)
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


def train(settings: dict[str, Any], options: argparse.Namespace) -> None:
    """Train as a rank of the job; rank 0 prints the outcome."""
    handle = trainer.init("ddp", seed=options.seed_of_job, **settings)
    data, test = load_dataset("mnist", options.data_dir, handle.world, handle.all_gather)
    tested = LargeNetwork().to(handle.device)
    torch.manual_seed(options.seed_of_job)
    network = LargeNetwork()
    model, optimizer = handle.prepare(network, torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9))
    loader, test_loader = handle.loader(data, BATCH), handle.loader(test, 1000, training=False)
    warm_up = LinearLR(optimizer, 0.1, total_iters=WARM_UP)
    cosine = CosineAnnealingLR(optimizer, options.epochs * loader.updates - WARM_UP)
    schedule = SequentialLR(optimizer, [warm_up, cosine], [WARM_UP])
    number, reached, percent = 0, None, 0.0
    for _ in range(options.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            handle.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()
            schedule.step()
            number += 1
            if number % EVERY == 0:
                percent = _accuracy(handle, network, tested, test_loader)
                reached = reached or (number if percent >= options.to else None)
    percent = _accuracy(handle, network, tested, test_loader)
    handle.print(f"updates-to: {json.dumps({'updates': reached, 'percent': percent})}")
    handle.close()


def _accuracy(handle: trainer.Run, network: nn.Module, tested: nn.Module, loader: Any) -> float:
    """Return the test accuracy in percent of the mean of the ranks' weights, which stay as they are.

    Args:
        tested: gets the mean.
    """
    correct = count = 0
    with torch.no_grad():
        for parameter, own in zip(tested.parameters(), network.parameters(), strict=True):
            parameter.copy_(handle.all_reduce(own.detach(), "mean"))
        for inputs, targets in loader:
            correct += int((tested(inputs).argmax(1) == targets).sum())
            count += len(targets)
    return 100 * float(handle.all_reduce(correct, "sum") / handle.all_reduce(count, "sum"))


def _settings_from(text: str) -> dict[str, Any]:
    """Return the settings of `trainer.init` in a text such as "sync_every=8,outer_lr=0.7"."""
    settings: dict[str, Any] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        try:
            settings[name] = json.loads(value)
        except json.JSONDecodeError:
            settings[name] = value
    return settings


def _parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="of MNIST (default: %(default)s)")
    add("--settings", nargs="+", default=list(SETTINGS), help="of trainer.init (default: %(default)s)")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], metavar="N", help="(default: 0 to 4)")
    add("--epochs", type=int, default=3, metavar="N", help="of 150 updates (default: %(default)s)")
    add("--to", type=float, default=98.0, metavar="PERCENT", help="(default: %(default)s)")
    add("--timeout", type=float, default=900.0, metavar="S", help="of one training (default: %(default)s)")
    add("--seed-of-job", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Trains a network until its test score has reached a target, as a rank of a job that benchmarks/time_to.py starts.

    torchrun --nproc-per-node 4 benchmarks/time_to_job.py language_model --settings sync_every=8

It imports nothing else from benchmarks/, because time_to.py copies this file alone to the nodes.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import trainer
from examples.datasets import load_dataset
from examples.datasets.text import STANDARD_LIBRARY, load_text
from examples.networks import LargeNetwork
from examples.transformer import SIZES, Transformer, parameter_groups

EVERY, WARM_UP = 16, 20
"""Updates from one evaluation to the next, and of the learning rate's warm-up."""
RESULT = "time-to: "
_LENGTH, _TEXT_BYTES, _TEST_WINDOWS = 64, 4_000_000, 512


@dataclass(frozen=True, kw_only=True)
class Task:
    """A network with its data, its recipe and its target."""

    network: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    data: Callable[[trainer.Run, Path], tuple[trainer.InMemory, trainer.InMemory]]
    """Returns the training and the test set; collective."""
    score: Callable[[Tensor, Tensor], Tensor]
    """Of logits (n, classes) and targets (n,), summed over them."""
    target: float
    is_loss: bool
    """Whether the score falls."""
    score_unit: str
    batch: int
    """Samples of a rank."""
    updates: int
    """Length of the learning rate's schedule, and the most updates."""
    clip_norm: float | None = None

    def is_reached(self, score: float) -> bool:
        """Return whether a score is as good as the target."""
        return score <= self.target if self.is_loss else score >= self.target


def _mnist(handle: trainer.Run, data_dir: Path) -> tuple[trainer.InMemory, trainer.InMemory]:
    return load_dataset("mnist", data_dir, handle.world, handle.all_gather)


def _text(handle: trainer.Run, data_dir: Path) -> tuple[trainer.InMemory, trainer.InMemory]:
    train, test = load_text(STANDARD_LIBRARY, _LENGTH, _TEXT_BYTES)
    few = slice(_TEST_WINDOWS)
    return (
        trainer.InMemory(train.inputs.long(), train.targets.long()),
        trainer.InMemory(test.inputs[few].long(), test.targets[few].long()),
    )


TASKS = {
    "mnist": Task(
        network=LargeNetwork,
        optimizer=lambda network: SGD(network.parameters(), lr=0.2, momentum=0.9),
        data=_mnist,
        score=lambda logits, targets: 100 * (logits.argmax(1) == targets).sum(),
        target=98.0,
        is_loss=False,
        score_unit="%",
        batch=100,
        updates=450,
    ),
    "language_model": Task(
        network=lambda: Transformer(*SIZES["3m"], _LENGTH),
        optimizer=lambda network: AdamW(parameter_groups(network, weight_decay=0.1), lr=1e-3, betas=(0.9, 0.95)),
        data=_text,
        score=lambda logits, targets: F.cross_entropy(logits, targets, reduction="sum") / math.log(2),
        target=3.1,
        is_loss=True,
        score_unit="bits/byte",
        batch=4,
        updates=300,
        clip_norm=1.0,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of one training."""

    updates: int
    """In all."""
    reached: int | None
    """Updates to the target; None where it was not reached."""
    seconds: float
    """Of the training, on the slowest rank, without the evaluations."""
    score: float
    """At the end."""


def main() -> int:
    trainer.report_failures()
    options = _parse_args()
    handle = trainer.init("ddp", seed=options.seed, **parse_settings(options.settings))
    task = TASKS[options.network]
    task = replace(task, target=task.target if options.to is None else options.to)
    result = train(task, handle, options.data_dir, seed=options.seed, whole=options.whole)
    handle.print(RESULT + json.dumps(asdict(result)))
    handle.close()
    return 0


def train(task: Task, handle: trainer.Run, data_dir: Path, *, seed: int, whole: bool = False) -> Result:
    """Train with an evaluation every `EVERY` updates, until the target is reached or to the end. Collective."""
    data, test = task.data(handle, data_dir)
    torch.manual_seed(seed)
    network = task.network()
    model, optimizer = handle.prepare(network, task.optimizer(network))
    loader, test_loader = handle.loader(data, task.batch), handle.loader(test, 1000, training=False)
    schedule = _schedule(optimizer, task.updates)
    # Only sync_every lets the ranks' weights differ; the mean of 25 MB takes seconds on a slow link.
    tested = copy.deepcopy(network) if handle.config.sync_every > 1 else network
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    seconds, reached, started = 0.0, None, _start(handle)
    for number, batch in enumerate(itertools.islice(batches, task.updates), 1):
        _update(task, handle, model, optimizer, batch)
        schedule.step()
        if number % EVERY and number < task.updates:
            continue
        seconds += max(handle.all_gather(time.perf_counter() - started))
        if number == task.updates:
            handle.average_weights()
        score = evaluate(task, handle, network, tested, test_loader)
        if handle.is_root:
            print(f"{number} updates, {seconds:.1f} s: {score:.2f} {task.score_unit}", file=sys.stderr, flush=True)
        if reached is None and task.is_reached(score):
            reached = number
            if not whole:
                break
        started = _start(handle)
    return Result(updates=number, reached=reached, seconds=seconds, score=score)


def _start(handle: trainer.Run) -> float:
    """Return the time, once all ranks are here."""
    handle.barrier()
    return time.perf_counter()


def _update(task: Task, handle: trainer.Run, model: nn.Module, optimizer: Optimizer, batch: Sequence[Tensor]) -> None:
    inputs, targets = batch
    optimizer.zero_grad()
    handle.backward(_loss(model(inputs), targets))
    if task.clip_norm is not None:
        handle.clip_grad_norm_(model, task.clip_norm)
    optimizer.step()


def evaluate(task: Task, handle: trainer.Run, network: nn.Module, tested: nn.Module, loader: trainer.Loader) -> float:
    """Return the mean test score of the mean of the ranks' weights, which stay as they are. Collective.

    Args:
        tested: gets the mean; `network` itself where all ranks have the same weights.
    """
    total, count = 0.0, 0
    with torch.no_grad():
        if tested is not network:
            # In one message: a link with a delay takes each of them anew.
            mean = handle.all_reduce(parameters_to_vector(network.parameters()), "mean")
            vector_to_parameters(mean, tested.parameters())
        for inputs, targets in loader:
            total += float(task.score(tested(inputs).flatten(0, -2), targets.flatten()))
            count += targets.numel()
    return float(handle.all_reduce(total, "sum") / handle.all_reduce(count, "sum"))


def parse_settings(text: str) -> dict[str, Any]:
    """Return the settings of `trainer.init` in a text such as "sync_every=8,full_updates=2"."""
    settings: dict[str, Any] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        try:
            settings[name] = json.loads(value)
        except json.JSONDecodeError:
            settings[name] = value
    return settings


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _schedule(optimizer: Optimizer, updates: int) -> SequentialLR:
    warm_up, cosine = LinearLR(optimizer, 0.1, total_iters=WARM_UP), CosineAnnealingLR(optimizer, updates - WARM_UP)
    return SequentialLR(optimizer, [warm_up, cosine], [WARM_UP])


def _parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("network", choices=TASKS)
    add("--settings", default="compression=none", help="of trainer.init (default: %(default)s)")
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="of MNIST (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    add("--to", type=float, metavar="SCORE", help="target (default: the network's)")
    add("--whole", action="store_true", help="train to the end, and not only to the target")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

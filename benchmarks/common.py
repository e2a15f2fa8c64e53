"""What the hand-written peers share: settings, data in memory, the loop, and the line in which they report.

A peer's own file holds what sets it apart: how its ranks meet, and what is wrapped around the optimizer. The
settings are those of every contestant, so they are written down once, here. 60,000 images are a whole number
of steps of 100 per rank on one rank and on two, so the loop needs no weights for an uneven tail.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from examples.datasets.mnist import find_mnist, normalize, read_mnist
from examples.mnist import TutorialNetwork
from trainer.data.loader import InMemory
from trainer.data.shard_plan import ShardPlan, mix_seeds, permutation
from trainer.errors import DataError

BATCH_SIZE = 100
"""Samples per rank and step."""
LEARNING_RATE = 0.01
"""For one rank."""
MOMENTUM = 0.5
EVAL_BATCH_SIZE = 1000
REPORT_PREFIX = "benchmark-report: "

Batch = tuple[Tensor, Tensor]
SumOverRanks = Callable[[Tensor], Tensor]


class Place(NamedTuple):
    """This process among those that train."""

    rank: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a contestant says about its run."""

    seconds: list[float]
    """Of each epoch's training, evaluation excluded."""
    losses: list[float]
    """Mean training loss of each epoch."""
    samples: list[int]
    """Trained on in each epoch, over all ranks."""
    accuracy: float
    """Share of the test set that is right after the last epoch, 0 to 1."""
    evaluated: int
    """Test samples behind it, over all ranks."""


def peer_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every loop has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    return parser


def mnist_folder(data_dir: Path) -> Path:
    """Where MNIST's files lie; raises `DataError` where they do not."""
    folder = find_mnist(data_dir)
    if folder is None:
        raise DataError(f"MNIST is not in {data_dir}; name the folder that holds MNIST/raw with --data-dir")
    return folder


def make_network(seed: int) -> nn.Module:
    """The tutorial network with weights from `seed`."""
    torch.manual_seed(seed)
    return TutorialNetwork()


def train_batches(data: InMemory, *, epoch: int, seed: int, place: Place) -> Iterator[Batch]:
    """This rank's batches of an epoch (from 0), in the order in which the library takes them."""
    order = permutation(len(data), epoch=epoch, seed=seed)
    plan = ShardPlan(samples=len(data), world_size=place.size, batch_size=BATCH_SIZE)
    for step in range(plan.steps):
        index = order[plan.shard(step, place.rank)]
        yield normalize(data.inputs.index_select(0, index)), data.targets.index_select(0, index)


def learning_rate(update: int, updates_per_epoch: int, size: int) -> float:
    """For update number `update`: scaled with the world, climbing there over the first epoch (Goyal et al. 2017)."""
    return LEARNING_RATE * (1 + (size - 1) * min(update + 1, updates_per_epoch) / updates_per_epoch)


def train_epoch(
    model: nn.Module, optimizer: Optimizer, data: InMemory, *, epoch: int, seed: int, place: Place
) -> Tensor:
    """One pass over this rank's samples; returns their summed loss and their number: float64, shape (2,)."""
    updates = len(data) // (BATCH_SIZE * place.size)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for step, (images, labels) in enumerate(train_batches(data, epoch=epoch, seed=seed, place=place)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(epoch * updates + step, updates, place.size)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach().double() * len(labels)
        count += len(labels)
    return torch.stack([total, torch.tensor(float(count), dtype=torch.float64)])


def train_and_report(
    model: nn.Module, optimizer: Optimizer, args: argparse.Namespace, place: Place, sum_over_ranks: SumOverRanks
) -> None:
    """Trains for `args.epochs` epochs, tests once, and prints the report on rank 0. Collective."""
    train, test = read_mnist(mnist_folder(args.data_dir))
    torch.manual_seed(mix_seeds(args.seed, place.rank))  # each rank drops out something else
    seconds, losses, samples = [], [], []
    for epoch in range(args.epochs):
        started = time.perf_counter()
        totals = train_epoch(model, optimizer, train, epoch=epoch, seed=args.seed, place=place)
        loss, count = sum_over_ranks(totals).tolist()
        seconds.append(time.perf_counter() - started)
        losses.append(loss / count)
        samples.append(round(count))
    correct, evaluated = sum_over_ranks(count_correct(model, test, place)).tolist()
    if place.rank == 0:
        report = Report(
            seconds=seconds, losses=losses, samples=samples, accuracy=correct / evaluated, evaluated=round(evaluated)
        )
        print(REPORT_PREFIX + json.dumps(asdict(report)), flush=True)


def count_correct(model: nn.Module, test: InMemory, place: Place) -> Tensor:
    """Correct predictions and samples behind them on this rank: float64, shape (2,), to be summed over ranks."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.float64)
    with torch.inference_mode():
        for start in range(place.rank * EVAL_BATCH_SIZE, len(test), place.size * EVAL_BATCH_SIZE):
            images = normalize(test.inputs[start : start + EVAL_BATCH_SIZE])
            labels = test.targets[start : start + EVAL_BATCH_SIZE]
            counts += torch.tensor([int((model(images).argmax(dim=1) == labels).sum()), len(labels)])
    model.train()
    return counts

"""Shared code of the hand-written loops: settings, data in memory, the loop, and the report line.

The file of a loop holds only what differs: how its ranks connect, and what is wrapped around the optimizer. The
settings are those of every contestant. 60,000 images are a whole number of steps of 100 per rank on one rank and on
two, so the loop needs no weights for an uneven tail.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
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
Backward = Callable[[Tensor], object]
"""Computes the gradients of a loss, which are the mean over the ranks at the optimizer's step."""


class RankInfo(NamedTuple):
    """This process's rank and the number of ranks."""

    rank: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """Report of a contestant's run."""

    seconds: list[float]
    """Of each epoch's training, evaluation excluded."""
    losses: list[float]
    """Mean training loss of each epoch."""
    samples: list[int]
    """Trained on in each epoch, over all ranks."""
    accuracy: float
    """Correct share of the test set after the last epoch, 0 to 1."""
    evaluated: int
    """Test samples behind `accuracy`, over all ranks."""


def sum_over_group(tensor: Tensor) -> Tensor:
    """Sum `tensor` over the ranks of torch.distributed in place, and return it; without a group there is one rank."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def end_with_gloo() -> NoReturn:
    """End this process without the interpreter's shutdown.

    Gloo's threads outlive the group. One that frees its last tensor during the shutdown aborts the process
    ("terminate called without an active exception").
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def loop_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every loop has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    return parser


def mnist_folder(data_dir: Path) -> Path:
    """Return the folder that holds MNIST's files; raise `DataError` where there is none."""
    folder = find_mnist(data_dir)
    if folder is None:
        raise DataError(f"MNIST is not in {data_dir}; name the folder that holds MNIST/raw with --data-dir")
    return folder


def make_network(seed: int) -> nn.Module:
    """Return the tutorial network with weights from `seed`."""
    torch.manual_seed(seed)
    return TutorialNetwork()


def train_batches(data: InMemory, *, epoch: int, seed: int, rank_info: RankInfo) -> Iterator[Batch]:
    """Yield this rank's batches of an epoch (from 0), in the library's order."""
    order = permutation(len(data), epoch=epoch, seed=seed)
    plan = ShardPlan(samples=len(data), world_size=rank_info.size, batch_size=BATCH_SIZE)
    for step in range(plan.steps):
        index = order[plan.shard(step, rank_info.rank)]
        yield normalize(data.inputs.index_select(0, index)), data.targets.index_select(0, index)


def learning_rate(update: int, updates_per_epoch: int, size: int) -> float:
    """Return the rate for an update: scaled with the ranks, warmed up over the first epoch (Goyal et al. 2017)."""
    return LEARNING_RATE * (1 + (size - 1) * min(update + 1, updates_per_epoch) / updates_per_epoch)


def train_epoch(
    model: nn.Module,
    optimizer: Optimizer,
    data: InMemory,
    *,
    epoch: int,
    seed: int,
    rank_info: RankInfo,
    backward: Backward = Tensor.backward,
) -> Tensor:
    """Train on this rank's samples once; return their summed loss and their number: float64, shape (2,)."""
    updates = len(data) // (BATCH_SIZE * rank_info.size)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for step, (images, labels) in enumerate(train_batches(data, epoch=epoch, seed=seed, rank_info=rank_info)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(epoch * updates + step, updates, rank_info.size)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        backward(loss)
        optimizer.step()
        total += loss.detach().double() * len(labels)
        count += len(labels)
    return torch.stack([total, torch.tensor(float(count), dtype=torch.float64)])


def train_and_report(
    model: nn.Module,
    optimizer: Optimizer,
    args: argparse.Namespace,
    rank_info: RankInfo,
    sum_over_ranks: SumOverRanks,
    backward: Backward = Tensor.backward,
) -> None:
    """Train for `args.epochs` epochs, test once, and print the report on rank 0. Collective."""
    train, test = read_mnist(mnist_folder(args.data_dir))
    torch.manual_seed(mix_seeds(args.seed, rank_info.rank))  # dropout differs between ranks
    seconds, losses, samples = [], [], []
    for epoch in range(args.epochs):
        started = time.perf_counter()
        totals = train_epoch(
            model, optimizer, train, epoch=epoch, seed=args.seed, rank_info=rank_info, backward=backward
        )
        loss, count = sum_over_ranks(totals).tolist()
        seconds.append(time.perf_counter() - started)
        losses.append(loss / count)
        samples.append(round(count))
    correct, evaluated = sum_over_ranks(count_correct(model, test, rank_info)).tolist()
    if rank_info.rank == 0:
        report = Report(
            seconds=seconds, losses=losses, samples=samples, accuracy=correct / evaluated, evaluated=round(evaluated)
        )
        print(REPORT_PREFIX + json.dumps(asdict(report)), flush=True)


def count_correct(model: nn.Module, test: InMemory, rank_info: RankInfo) -> Tensor:
    """Return this rank's correct predictions and tested samples: float64, shape (2,), to be summed over ranks."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.float64)
    with torch.inference_mode():
        for start in range(rank_info.rank * EVAL_BATCH_SIZE, len(test), rank_info.size * EVAL_BATCH_SIZE):
            images = normalize(test.inputs[start : start + EVAL_BATCH_SIZE])
            labels = test.targets[start : start + EVAL_BATCH_SIZE]
            counts += torch.tensor([int((model(images).argmax(dim=1) == labels).sum()), len(labels)])
    model.train()
    return counts

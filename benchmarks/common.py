"""Shared code of the hand-written loops: data in memory, the loop, and the report line.

The file of a loop holds only what differs: how its ranks connect, and what is wrapped around the optimizer. What they
train is one of workloads.py, the same for every contestant.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from benchmarks.workloads import TUTORIAL, WORKLOADS, Workload
from trainer.data.loader import InMemory
from trainer.data.shard_plan import ShardPlan, mix_seeds, permutation

REPORT_PREFIX = "benchmark-report: "

Batch = tuple[Tensor, Tensor]
SumOverRanks = Callable[[Tensor], Tensor]
Backward = Callable[[Tensor], object]
"""Computes the gradients of a loss, which are the mean over the ranks at the optimizer's step."""
MakeLoader = Callable[[InMemory, int], Iterable[Batch]]
"""Returns this rank's batches of so many samples, another epoch's each time that it is iterated."""


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
    score: float
    """On the test set after the last epoch: the workload's, a mean over samples or bytes."""
    evaluated: int
    """Test samples behind `score`, over all ranks."""


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
    parser.add_argument("--network", choices=WORKLOADS, default=TUTORIAL, help="(default: %(default)s)")
    parser.add_argument(
        "--data-dir", type=Path, default=Path("data"), metavar="DIR", help="of MNIST (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=2, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    return parser


def train_batches(workload: Workload, data: InMemory, *, epoch: int, seed: int, rank_info: RankInfo) -> Iterator[Batch]:
    """Yield this rank's batches of an epoch (from 0), in the library's order."""
    order = permutation(len(data), epoch=epoch, seed=seed)
    plan = ShardPlan(samples=len(data), world_size=rank_info.size, batch_size=workload.batch_size)
    for step in range(plan.steps):
        index = order[plan.shard(step, rank_info.rank)]
        yield data.inputs.index_select(0, index), data.targets.index_select(0, index)


def train_epoch(
    workload: Workload,
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Batch],
    *,
    first_update: int,
    updates: int,
    rank_info: RankInfo,
    backward: Backward = Tensor.backward,
) -> Tensor:
    """Train on an epoch's batches; return their summed loss and their samples: float64, shape (2,)."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for update, (inputs, targets) in enumerate(batches, first_update):
        for group in optimizer.param_groups:
            group["lr"] = workload.learning_rate(update, updates, rank_info.size)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(workload.prepare(inputs)).flatten(0, -2), targets.flatten())
        backward(loss)
        optimizer.step()
        total += loss.detach().double() * len(targets)
        count += len(targets)
    return torch.stack([total, torch.tensor(float(count), dtype=torch.float64)])


def train_and_report(
    model: nn.Module,
    optimizer: Optimizer,
    args: argparse.Namespace,
    rank_info: RankInfo,
    sum_over_ranks: SumOverRanks,
    backward: Backward = Tensor.backward,
    *,
    network: nn.Module | None = None,
    make_loader: MakeLoader | None = None,
) -> None:
    """Train for `args.epochs` epochs, test once, and print the report on rank 0. Collective.

    Args:
        network: what `model` wraps, where it does; it is tested, as a wrapper's forward pass may be every rank's.
        make_loader: of a library that has a loader of its own, in place of `train_batches`.
    """
    workload = WORKLOADS[args.network]
    train, test = workload.data(args.data_dir)
    loader = make_loader(train, workload.batch_size) if make_loader else None
    updates = len(train) // (workload.batch_size * rank_info.size)
    torch.manual_seed(mix_seeds(args.seed, rank_info.rank))  # dropout differs between ranks
    seconds, losses, samples = [], [], []
    for epoch in range(args.epochs):
        started = time.perf_counter()
        totals = train_epoch(
            workload, model, optimizer,
            loader or train_batches(workload, train, epoch=epoch, seed=args.seed, rank_info=rank_info),
            first_update=epoch * updates, updates=updates, rank_info=rank_info, backward=backward,
        )  # fmt: skip
        loss, count = sum_over_ranks(totals).tolist()
        seconds.append(time.perf_counter() - started)
        losses.append(loss / count)
        samples.append(round(count))
    score, evaluated = sum_over_ranks(evaluate(workload, network or model, test, rank_info)).tolist()
    if rank_info.rank == 0:
        report = Report(
            seconds=seconds, losses=losses, samples=samples, score=score / evaluated, evaluated=round(evaluated)
        )
        print(REPORT_PREFIX + json.dumps(asdict(report)), flush=True)


def evaluate(workload: Workload, network: nn.Module, test: InMemory, rank_info: RankInfo) -> Tensor:
    """Return this rank's summed scores and its test samples: float64, shape (2,), to be summed over ranks."""
    network.eval()
    size = workload.eval_batch_size
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.inference_mode():
        for start in range(rank_info.rank * size, len(test), rank_info.size * size):
            targets = test.targets[start : start + size]
            logits = network(workload.prepare(test.inputs[start : start + size])).flatten(0, -2)
            score = workload.score(logits, targets.flatten()).double() / targets[0].numel()
            sums += torch.stack([score, torch.tensor(float(len(targets)), dtype=torch.float64)])
    network.train()
    return sums

"""The hand-written loop that all contestants of a benchmark share, and the report line.

loops.py has what differs: how the ranks connect, and what is wrapped around the optimizer. What they train is one of
workloads.py, the same for every contestant.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from benchmarks.workloads import Workload
from trainer.data.loader import InMemory
from trainer.data.shard_plan import ShardPlan, mix_seeds, permutation

REPORT_PREFIX = "benchmark-report: "

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A rank that has joined the others through some library."""

    rank: int
    size: int
    """Number of ranks."""
    model: nn.Module
    """The network, or what the library wraps around it."""
    optimizer: Optimizer
    sum_over_ranks: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor], object] = Tensor.backward
    """Computes the gradients of a loss, which are the mean over the ranks at the optimizer's step."""
    make_loader: Callable[[InMemory, int], Iterable[Batch]] | None = None
    """Returns this rank's batches of so many samples, another epoch's each time; None for `train_batches`."""
    close: Callable[[], object] = lambda: None


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
    scheduled: tuple[float, float] = (0.0, 0.0)
    """Seconds of the last epoch in which rank 0's training thread ran, and waited for a core: Linux's schedstat."""


def train_and_report(
    joined: Joined, workload: Workload, network: nn.Module, data_dir: Path, *, epochs: int, seed: int
) -> None:
    """Train, test once, and print the report on rank 0. Collective.

    Args:
        network: what is tested, as the forward pass of a wrapper may be every rank's.
    """
    train, test = workload.data(data_dir)
    loader = joined.make_loader(train, workload.batch_size) if joined.make_loader else None
    torch.manual_seed(mix_seeds(seed, joined.rank))  # dropout differs between ranks
    seconds, losses, samples = [], [], []
    for epoch in range(epochs):
        batches = loader or _train_batches(joined, workload, train, epoch=epoch, seed=seed)
        before, started = _scheduled(), time.perf_counter()
        totals = _train_epoch(joined, workload, batches, epoch=epoch, samples=len(train))
        loss, count = joined.sum_over_ranks(totals).tolist()
        seconds.append(time.perf_counter() - started)
        ran, waited = (after - then for after, then in zip(_scheduled(), before, strict=True))
        losses.append(loss / count)
        samples.append(round(count))
    score, evaluated = joined.sum_over_ranks(_evaluate(joined, workload, network, test)).tolist()
    if joined.rank == 0:
        report = Report(
            seconds=seconds, losses=losses, samples=samples, score=score / evaluated, evaluated=round(evaluated),
            scheduled=(ran, waited),
        )  # fmt: skip
        print(REPORT_PREFIX + json.dumps(asdict(report)), flush=True)


def _scheduled() -> list[float]:
    numbers = Path("/proc/thread-self/schedstat")  # which a sandboxed kernel may lack
    return [int(number) / 1e9 for number in (numbers.read_text() if numbers.exists() else "0 0").split()[:2]]


def _train_batches(joined: Joined, workload: Workload, data: InMemory, *, epoch: int, seed: int) -> Iterator[Batch]:
    """Yield this rank's batches of an epoch (from 0), in the library's order."""
    order = permutation(len(data), epoch=epoch, seed=seed)
    plan = ShardPlan(samples=len(data), world_size=joined.size, batch_size=workload.batch_size)
    for step in range(plan.steps):
        index = order[plan.shard(step, joined.rank)]
        yield data.inputs.index_select(0, index), data.targets.index_select(0, index)


def _train_epoch(joined: Joined, workload: Workload, batches: Iterable[Batch], *, epoch: int, samples: int) -> Tensor:
    """Train on an epoch's batches; return their summed loss and their samples: float64, shape (2,)."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    updates, optimizer = samples // (workload.batch_size * joined.size), joined.optimizer
    for update, (inputs, targets) in enumerate(batches, epoch * updates):
        for group in optimizer.param_groups:
            group["lr"] = workload.learning_rate(update, updates, joined.size)
        optimizer.zero_grad()
        loss = F.cross_entropy(joined.model(workload.prepare(inputs)).flatten(0, -2), targets.flatten())
        joined.backward(loss)
        optimizer.step()
        total += loss.detach().double() * len(targets)
        count += len(targets)
    return torch.stack([total, torch.tensor(float(count), dtype=torch.float64)])


def _evaluate(joined: Joined, workload: Workload, network: nn.Module, test: InMemory) -> Tensor:
    """Return this rank's summed scores and its test samples: float64, shape (2,), to be summed over ranks."""
    network.eval()
    size = workload.eval_batch_size
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.inference_mode():
        for start in range(joined.rank * size, len(test), joined.size * size):
            targets = test.targets[start : start + size]
            logits = network(workload.prepare(test.inputs[start : start + size])).flatten(0, -2)
            score = workload.score(logits, targets.flatten()).double() / targets[0].numel()
            sums += torch.stack([score, torch.tensor(float(len(targets)), dtype=torch.float64)])
    return sums

"""Trains in blocks that save in different ways, in turns. benchmarks/checkpoints.py starts it.

python benchmarks/checkpoint_loop.py --data-dir data
horovodrun -np 2 python benchmarks/checkpoint_loop.py --data-dir data
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainer
from benchmarks.checkpoint_savers import SAVERS, Saver, Setting
from benchmarks.common import REPORT_PREFIX
from benchmarks.workloads import BATCH_SIZE
from examples.datasets import DATASETS, load_dataset
from examples.networks import NETWORKS
from trainer.data.base import Loader
from trainer.ops.processes import INTERRUPTS, interrupt_on


@dataclass(frozen=True, kw_only=True)
class Block:
    """So many updates in a row, with checkpoints made in one way. Seconds are rank 0's."""

    saver: str
    round: int
    seconds: float
    """Until the last update is done, and the last checkpoint is written."""
    stalls_s: Sequence[float]
    """Of each checkpoint."""
    writes_s: Sequence[float]
    """Of each checkpoint."""
    update_s: float
    """Median of the updates while nothing was written."""
    meanwhile_s: float | None
    """Median of the updates while a checkpoint was written; None where there was no such update."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of one job."""
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--dataset", default="mnist", choices=DATASETS, help="(default: %(default)s)")
    parser.add_argument("--network", default="large", choices=list(NETWORKS), help="(default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs"), metavar="DIR", help="where to write (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds (default: %(default)s)")
    parser.add_argument(
        "--updates", type=int, default=60, metavar="N", help="between two checkpoints (default: %(default)s)"
    )
    parser.add_argument("--checkpoints", type=int, default=2, metavar="N", help="in a block (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=list(SAVERS), choices=list(SAVERS), help="(default: all)")


class Loop:
    """A training whose blocks save in different ways."""

    def __init__(self, run: trainer.Run, network: nn.Module, data: trainer.InMemory, every: int) -> None:
        self.run, self._every = run, every
        self.optimizer = torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9)
        self.network = network
        self._model, _ = run.prepare(network, self.optimizer)
        self._loader: Loader = run.loader(data, batch_size=BATCH_SIZE)

    def train(self, saver: Saver, updates: int) -> tuple[float, list[float], list[float]]:
        """Train; return the seconds, and those of each update while nothing and while something was written."""
        self._loader.observer = saver.observer
        alone_s: list[float] = []
        meanwhile_s: list[float] = []
        self.run.barrier()
        started = time.perf_counter()
        for number, batch in enumerate(_endless(self._loader)):
            if number == updates:
                break
            if number % self._every == 1:  # where the observer of ours has just saved
                saver.save()
            is_writing, began = saver.is_writing, time.perf_counter()
            self._update(*batch)
            if number % self._every:  # the first one of an interval starts with what the last block has left
                (meanwhile_s if is_writing else alone_s).append(time.perf_counter() - began)
        if self.run.is_root:
            saver.wait()
        self.run.barrier()
        return time.perf_counter() - started, alone_s, meanwhile_s

    def _update(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self._model(inputs), targets)
        self.run.backward(loss)
        self.optimizer.step()


def _endless(loader: Loader) -> Iterator[Any]:
    while True:
        yield from loader


def measure(loop: Loop, folder: Path, args: argparse.Namespace) -> list[Block]:
    """Train in rounds with a block for each way of saving; every other round runs in reverse order. Collective."""
    savers: dict[str, Saver] = {}
    for name in args.only:
        place = folder / name
        place.mkdir(exist_ok=True)
        savers[name] = SAVERS[name][1](Setting(loop.run, loop.network, loop.optimizer, place, args.updates))
        # The checkpoints of ours begin with update number `updates`: from here on after the first one of each block.
        loop.train(savers[name], 2 * args.updates - 1)
    blocks = []
    for number in range(args.repeats):
        for name in args.only if number % 2 == 0 else reversed(args.only):
            saver = savers[name]
            stalls, writes = len(saver.stalls_s), len(saver.writes_s)
            seconds, alone_s, meanwhile_s = loop.train(saver, args.updates * args.checkpoints)
            blocks.append(
                Block(
                    saver=name,
                    round=number,
                    seconds=seconds,
                    stalls_s=saver.stalls_s[stalls:],
                    writes_s=saver.writes_s[writes:],
                    update_s=median(alone_s or meanwhile_s),
                    meanwhile_s=median(meanwhile_s) if meanwhile_s else None,
                )
            )
    return blocks


def main() -> None:
    trainer.report_failures()
    interrupt_on(*INTERRUPTS)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_options(parser)
    args = parser.parse_args()
    run = trainer.init(device="cpu")
    data, _ = load_dataset(args.dataset, args.data_dir, run.world, run.all_gather)
    torch.manual_seed(0)
    args.folder.mkdir(parents=True, exist_ok=True)
    loop = Loop(run, NETWORKS[args.network](), data, args.updates)
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=args.folder) as own:
        blocks = measure(loop, Path(run.broadcast(own)), args)
        run.close()
        if run.is_root:
            print(REPORT_PREFIX + json.dumps([asdict(block) for block in blocks]), flush=True)


if __name__ == "__main__":
    main()

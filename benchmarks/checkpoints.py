"""Measures what checkpoints cost: ours, `torch.save` in the loop, and torch.distributed.checkpoint (DCP).

python -m benchmarks.checkpoints --data-dir data
torchrun --nproc-per-node 2 -m benchmarks.checkpoints --data-dir data

The job trains in blocks of so many updates, with checkpoints made in one way in each. The blocks take turns in rounds;
every other round runs in reverse order. All figures are rank 0's. The stall is what a checkpoint keeps the training
waiting. What it costs in all is (seconds of a block with checkpoints - seconds of the same round's block without) /
number of checkpoints; a block's seconds include what is still to be written at its end. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.nn import functional as F

import trainer
from benchmarks.workloads import BATCH_SIZE
from examples.datasets import DATASETS, load_dataset
from examples.networks import NETWORKS
from trainer.data.base import Loader

CHECKPOINTS = 2
"""In a block."""


class Training:
    """A training with checkpoints in one way after another."""

    def __init__(self, run: trainer.Run, network: str, data: trainer.InMemory, every: int) -> None:
        self.run, self.every, self.model = run, every, NETWORKS[network]()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=0.9)
        self._forward, _ = run.prepare(self.model, self.optimizer)
        self.loader: Loader = run.loader(data, batch_size=BATCH_SIZE)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def train(self, saver: Saver, updates: int) -> float:
        """Train; return the seconds until all is done and written."""
        kept = [each for each in self.loader.observers if not isinstance(each, trainer.Checkpoints)]
        self.loader.observers = [*kept, saver.observer] if saver.observer is not None else kept
        self.run.barrier()
        started = time.perf_counter()
        for number, (inputs, targets) in enumerate(self._endless()):
            if number == updates:
                break
            if number % self.every == 1:  # where the observer of ours has just saved
                saver.save()
            self.optimizer.zero_grad()
            self.run.backward(F.cross_entropy(self._forward(inputs), targets))
            self.optimizer.step()
        saver.wait()
        self.run.barrier()
        return time.perf_counter() - started

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader


class Saver:
    """A way of saving; this saves nothing.

    Attributes:
        stalls_s: seconds for which each checkpoint has kept this rank from training.
        writes_s: seconds until each was on the disk.
        observer: saves in the loader, in place of `save`.
    """

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder
        self.stalls_s: list[float] = []
        self.writes_s: list[float] = []
        self.observer: trainer.Checkpoints | None = None

    def save(self) -> None:
        """Save, and return when the training may go on. Collective."""

    def wait(self) -> None:
        """Return when everything is written, on rank 0."""
        while self.training.run.is_root and len(self.writes_s) < len(self.stalls_s):
            time.sleep(0.001)


class Ours(Saver):
    """The library's checkpoints."""

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self.observer = training.run.checkpoints(folder, every_updates=training.every, on_error="stop")
        self.stalls_s, self.writes_s = self.observer.stalls_s, self.observer.writes_s
        self._epochs = training.run.epochs(1)
        next(self._epochs)  # all blocks are an epoch to it


class TorchSave(Saver):
    """`torch.save` within the loop: rank 0 writes, syncs and renames a file, and the others wait."""

    def save(self) -> None:
        started = time.perf_counter()
        if self.training.run.is_root:
            partial = self.folder / "partial.pt"
            with partial.open("wb") as file:
                torch.save(self.training.state(), file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.folder / "checkpoint.pt")
        self.training.run.barrier()
        self.stalls_s.append(time.perf_counter() - started)
        self.writes_s.append(self.stalls_s[-1])


class Distributed(Saver):
    """torch.distributed.checkpoint's `async_save` on all ranks, which keeps its host memory from one to the next."""

    kind = AsyncCheckpointerType.THREAD

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # of the writing processes' own group
        if not dist.is_initialized():
            make_store: Any = dist.HashStore  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=make_store(), rank=0, world_size=1)
        self._group: Any = dist.new_group(backend="gloo")
        in_shared_memory = self.kind == AsyncCheckpointerType.PROCESS
        self._stager = DefaultStager(StagingOptions(False, in_shared_memory, False, False))
        self._future: Future[Any] | None = None
        self._count = 0

    def save(self) -> None:
        started = time.perf_counter()
        if self._future is not None:
            self._future.result()
        future: Any = async_save(
            self.training.state(),
            checkpoint_id=self.folder / str(self._count),
            process_group=self._group,
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
        )
        self._count += 1
        self.stalls_s.append(time.perf_counter() - started)
        future.add_done_callback(lambda _: self.writes_s.append(time.perf_counter() - started))
        self._future = future


class DistributedProcess(Distributed):
    """The same, written by a process beside each rank."""

    kind = AsyncCheckpointerType.PROCESS


SAVERS: dict[str, Callable[[Training, Path], Saver]] = {
    "no checkpoints": Saver,
    "**trainer**": Ours,
    "`torch.save` on rank 0, fsync, barrier": TorchSave,
    "DCP `async_save`, threads": Distributed,
    "DCP `async_save`, processes": DistributedProcess,
}
"""By the name of the row."""


def measure(training: Training, folder: Path, repeats: int) -> None:
    """Train in rounds with a block for each way of saving, and print a row for each. Collective."""
    savers, seconds = {}, {name: list[float]() for name in SAVERS}
    for number, (name, make) in enumerate(SAVERS.items()):
        (folder / str(number)).mkdir(exist_ok=True)
        savers[name] = make(training, folder / str(number))
        # The checkpoints of ours begin with update number `every`: from here on after the first of each block.
        training.train(savers[name], 2 * training.every - 1)
        savers[name].stalls_s.clear()
        savers[name].writes_s.clear()
    for number in range(repeats):
        for name in SAVERS if number % 2 == 0 else reversed(SAVERS):
            seconds[name].append(training.train(savers[name], training.every * CHECKPOINTS))
    training.run.print("| ranks | saved by | stall, ms | written after, s | a checkpoint costs, s | at one a minute |")
    training.run.print("|---|---|---|---|---|---|")
    for name, saver in list(savers.items())[1:] if training.run.is_root else ():
        pairs = zip(seconds[name], seconds["no checkpoints"], strict=True)
        each_s = median((with_s - without_s) / CHECKPOINTS for with_s, without_s in pairs)
        cells = (
            f"{1000 * median(saver.stalls_s):.1f} | {median(saver.writes_s):.2f} | {each_s:.3f} | {each_s / 0.6:.2f} %"
        )
        print(f"| {training.run.world_size} | {name} | {cells} |")


def main() -> None:
    trainer.report_failures()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--dataset", default="mnist", choices=DATASETS, help="(default: %(default)s)")
    parser.add_argument("--network", default="large", choices=list(NETWORKS), help="(default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write (default: that of temporary files)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=60, metavar="N", help="per checkpoint (default: %(default)s)")
    args = parser.parse_args()
    run = trainer.init(device="cpu")
    data, _ = load_dataset(args.dataset, args.data_dir, run.world, run.all_gather)
    torch.manual_seed(0)
    training = Training(run, args.network, data, args.updates)
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=args.folder) as folder:
        measure(training, Path(run.broadcast(folder)), args.repeats)
        run.close()


if __name__ == "__main__":
    main()

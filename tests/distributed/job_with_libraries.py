"""Libraries that ask torch.distributed, or RANK, whether they are alone; a job of every launcher, in .venv-peers."""

from __future__ import annotations

import io
import os
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torchmetrics
import webdataset
from torch.distributed.nn.functional import all_gather

import trainer


def accuracy(run: trainer.Run) -> float:
    """Return the accuracy over an uneven evaluation: 7 samples, of which the first 4 are predicted."""
    metric = torchmetrics.Accuracy(task="multiclass", num_classes=2)
    data = torch.utils.data.TensorDataset(torch.arange(7.0).view(-1, 1), torch.zeros(7, dtype=torch.long))
    for inputs, targets in run.loader(data, 2, training=False):
        metric.update((inputs.view(-1) >= 4).long(), targets)
    return float(metric.compute())


def shards(run: trainer.Run, folder: Path) -> list[str]:
    """Return the samples of this rank's shards of a web dataset that has four, of a sample each."""
    if run.is_root:
        for number in range(4):
            with tarfile.open(folder / f"{number}.tar", "w") as archive:
                entry = tarfile.TarInfo(f"{number}.txt")
                entry.size = 1
                archive.addfile(entry, io.BytesIO(b"%d" % number))
    run.barrier()
    urls = str(folder / "{0..3}.tar")
    dataset = webdataset.WebDataset(urls, nodesplitter=webdataset.split_by_node, shardshuffle=False)
    # A worker knows the ranks by their variables.
    return [sample["txt"].decode() for sample in torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1)]


def gathered_gradient(run: trainer.Run) -> float:
    """Return the gradient of a sum over all ranks' values, taken through torch.distributed's own all-gather."""
    mine = torch.full((1,), float(run.rank + 1), requires_grad=True)
    (torch.cat(all_gather(mine)) ** 2).sum().backward()
    assert mine.grad is not None
    return float(mine.grad)


if __name__ == "__main__":
    if "--own-group" in sys.argv:
        first = trainer.current_world()
        store = dist.FileStore(os.environ["TRAINER_TEST_STORE"])  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=first.rank, world_size=first.size)
    strategy = os.environ.get("TRAINER_TEST_STRATEGY", "auto")
    run = trainer.init(strategy=strategy)
    again = trainer.init(strategy=strategy).strategy.description
    with tempfile.TemporaryDirectory() as made:
        folder = Path(run.broadcast(made))
        mine = shards(run, folder)
        found = run.all_gather(
            (accuracy(run), mine, gathered_gradient(run), os.environ["LOCAL_RANK"], again == run.strategy.description)
        )
    run.print(found)
    if "--own-group" in sys.argv:
        dist.destroy_process_group()

"""Trains for the tests of lost nodes and for preemptions.py, and writes down which samples went into each update.

Each rank of each start writes a record an update to a file of its own in a folder. A checkpoint holds its lineage: the
starts of the job that have led to it, and the number of updates at which each began. At the end, rank 0 writes lineage
and test accuracy to result.json there.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import uuid
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.nn import functional as F

import trainer
from examples.datasets import load_dataset
from examples.networks import DefaultNetwork
from trainer.files import write_atomically

_LR = 0.1


def record_type(batch: int) -> numpy.dtype[numpy.void]:
    """Return the type of a record: when an update began, its number from 1, and a rank's samples in it, -1 for none."""
    return numpy.dtype([("time", "<f8"), ("update", "<i8"), ("samples", "<i4", (batch,))])


def main() -> None:
    trainer.report_failures()
    options = _parse_args()
    run = trainer.init(device="cpu")
    train, test = load_dataset(options.dataset, Path("data"), run.world, run.all_gather)
    numbered = torch.stack([train.targets, torch.arange(len(train))], dim=1)
    torch.manual_seed(0)
    model = DefaultNetwork()
    forward, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=_LR, momentum=0.9))
    # The same for every number of ranks, so that an epoch has as many updates.
    size = options.global_batch_size
    loader = run.loader(trainer.InMemory(train.inputs, numbered, train.transform), global_batch_size=size)
    updates_per_epoch = math.ceil(len(train) / size)
    origin: dict[str, list[tuple[str, int]]] = {"lineage": []}
    saved = run.checkpoints(options.checkpoints, every_s=options.every_s, state={"origin": origin})
    update, start = saved.updates, run.broadcast(uuid.uuid4().hex)
    origin["lineage"].append((start, update))
    batch = math.ceil(size / run.world_size)
    with (options.folder / f"{start}-{run.rank}-{run.world_size}-{batch}").open("wb", buffering=0) as records:
        for epoch in run.epochs(options.epochs):
            for inputs, pairs in loader:
                update += 1
                # Before the update, so that no checkpoint holds one without its record.
                samples = F.pad(pairs[:, 1], (0, batch - len(pairs)), value=-1)
                records.write(numpy.array([(time.time(), update, samples.numpy())], record_type(batch)).tobytes())
                optimizer.param_groups[0]["lr"] = learning_rate(update, updates_per_epoch, options.epochs)
                time.sleep(options.pause_s)
                optimizer.zero_grad()
                run.backward(F.cross_entropy(forward(inputs), pairs[:, 0]))
                optimizer.step()
            run.print(f"epoch {epoch + 1}/{options.epochs}")
    if run.is_root:
        facts = {"epochs": options.epochs, "samples": len(train), "updates_per_epoch": updates_per_epoch}
        result = {"lineage": origin["lineage"], "accuracy": accuracy_of(model, test), **facts}
        write_atomically(options.folder / "result.json", json.dumps(result) + "\n")


def learning_rate(update: int, updates_per_epoch: int, epochs: int) -> float:
    """Return the learning rate of an update: it rises over an epoch, and falls along a cosine."""
    part = update / updates_per_epoch
    return _LR * min(1.0, part) * (1 + math.cos(math.pi * part / epochs)) / 2


def accuracy_of(model: nn.Module, test: trainer.InMemory) -> float:
    """Return the part of the test set that the model gets right, in percent."""
    model.eval()
    right = 0
    with torch.no_grad():
        for numbers in torch.arange(len(test)).split(1000):
            inputs, targets = test[numbers]
            right += int((model(inputs).argmax(dim=1) == targets).sum())
    return 100 * right / len(test)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("epochs", type=int)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--global-batch-size", type=int, default=200)
    parser.add_argument("--every-s", type=float, default=2.0, help="between two checkpoints")
    parser.add_argument("--pause-s", type=float, default=0.0, help="in each update, so that a small dataset lasts")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Trains on MNIST for chaos.py, and writes down which samples went into each update.

chaos_job.py FOLDER EPOCHS CHECKPOINTS. Each rank of each start appends a record an update to a file of its own in
FOLDER. A checkpoint holds its lineage: the starts of the job that have led to it, and the update at which each began.
At the end, rank 0 writes lineage and test accuracy to FOLDER/result.json.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.nn import functional as F

import trainer
from examples.datasets import load_dataset
from examples.mnist import DefaultNetwork
from trainer.files import write_atomically
from trainer.launch.status import JOB

SAMPLES = 60_000
GLOBAL_BATCH = 200
"""The same for every number of ranks, so that an epoch has as many updates."""
UPDATES_PER_EPOCH = SAMPLES // GLOBAL_BATCH
_LR, _WARM_UP_UPDATES = 0.1, 300


def record_type(ranks: int) -> numpy.dtype[numpy.void]:
    """Return the type of a record: when an update began, its number from 1, and the samples of one rank in it."""
    return numpy.dtype([("time", "<f8"), ("update", "<i8"), ("samples", "<i4", (GLOBAL_BATCH // ranks,))])


def main() -> None:
    trainer.report_failures()
    folder, epochs, checkpoints = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    run = trainer.init(device="cpu")
    train, test = load_dataset("mnist", Path("data"), run.world, run.all_gather)
    numbered = torch.stack([train.targets, torch.arange(len(train))], dim=1)
    torch.manual_seed(0)
    model = DefaultNetwork()
    forward, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=_LR, momentum=0.9))
    loader = run.loader(trainer.InMemory(train.inputs, numbered, train.transform), global_batch_size=GLOBAL_BATCH)
    origin: dict[str, list[tuple[str, int]]] = {"lineage": []}
    saved = run.checkpoints(checkpoints, every_s=2, state={"origin": origin})
    update, job = saved.updates, os.environ[JOB]
    origin["lineage"].append((job, update))
    kind = record_type(run.world_size)
    with (folder / f"{job}-{run.rank}-{run.world_size}").open("ab", buffering=0) as records:
        for epoch in run.epochs(epochs):
            for inputs, pairs in loader:
                update += 1
                # Before the update, so that no checkpoint holds one without its record.
                records.write(numpy.array([(time.time(), update, pairs[:, 1].numpy())], kind).tobytes())
                optimizer.param_groups[0]["lr"] = learning_rate(update, epochs * UPDATES_PER_EPOCH)
                optimizer.zero_grad()
                run.backward(F.cross_entropy(forward(inputs), pairs[:, 0]))
                optimizer.step()
            run.print(f"epoch {epoch + 1}/{epochs}")
    if run.is_root:
        result = {"lineage": origin["lineage"], "accuracy": accuracy_of(model, test)}
        write_atomically(folder / "result.json", json.dumps(result) + "\n")


def learning_rate(update: int, updates: int) -> float:
    """Return the learning rate of an update: it rises over an epoch, then falls along a cosine."""
    return _LR * min(1.0, update / _WARM_UP_UPDATES) * (1 + math.cos(math.pi * update / updates)) / 2


def accuracy_of(model: nn.Module, test: trainer.InMemory) -> float:
    """Return the part of the test set that the model gets right, in percent."""
    model.eval()
    right = 0
    with torch.no_grad():
        for at in range(0, len(test), 1000):
            inputs, targets = test[torch.arange(at, at + 1000)]
            right += int((model(inputs).argmax(dim=1) == targets).sum())
    return 100 * right / len(test)


if __name__ == "__main__":
    main()

"""A training that makes one fault: what the trials of `trainer run` start.

The fault is in plan.json, and fault.json notes when it was made, so that only one start makes it. Each rank appends a
line to a file of its own for every update, once it has taken it. The end writes the weights.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

from tests.faults.job_faults import Fault
from trainer.cluster.environment import read_launch

EPOCHS, SAMPLES, BATCH = 4, 77, 8
UPDATES = EPOCHS * -(-SAMPLES // BATCH)
SAVE_EVERY = 3
CHECKPOINTS, LOG, WEIGHTS = "checkpoints", "log", "weights.pt"
_UPDATE_S = 0.03


class Log:
    """The file of one rank in one start of the job. A line is one write, which is there even if the rank is killed."""

    def __init__(self, start: str, rank: int) -> None:
        Path(LOG).mkdir(exist_ok=True)
        path = Path(LOG, f"{start}-{rank}.jsonl")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, **facts: Any) -> None:
        os.write(self._file, (json.dumps({**facts, "time": time.monotonic()}) + "\n").encode())


def main() -> None:
    fault = Fault(read_launch().rank)
    fault.at("import")
    train(fault)


def train(fault: Fault) -> None:
    import torch
    from torch import nn
    from torch.nn import functional as F

    import trainer

    run = trainer.init(device="cpu")
    fault.at("init")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)).double()
    forward, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    inputs, classes = torch.randn(SAMPLES, 6).double(), torch.randint(3, (SAMPLES,))
    # The targets are the samples' own numbers.
    loader = run.loader(trainer.InMemory(inputs, torch.arange(SAMPLES)), global_batch_size=BATCH)
    torch.manual_seed(3 + run.rank)
    checkpoints = run.checkpoints(CHECKPOINTS, every_updates=SAVE_EVERY, keep=2)
    start = run.strategy.broadcast_object(uuid.uuid4().hex if run.is_root else None)
    log, resumed = Log(start, run.rank), checkpoints.resumed
    log.write(attempt=checkpoints.attempt, resumed=resumed.checkpoint.path.name if resumed else None)
    fault.at("checkpoints")
    for epoch in run.epochs(EPOCHS):
        for batch, samples in loader:
            update = checkpoints.updates + 1
            fault.at("before backward", update)
            run.backward(F.cross_entropy(forward(batch), classes[samples]))
            fault.at("before step", update)
            optimizer.step()
            optimizer.zero_grad()
            log.write(update=update, epoch=epoch, samples=samples.tolist())
            fault.at("after step", update)
            time.sleep(_UPDATE_S)
    if run.is_root:
        torch.save(model.state_dict(), WEIGHTS)


if __name__ == "__main__":
    main()

"""Trains with checkpoints, and is interrupted on its last rank; for test_checkpoints.py.

job_that_goes_on.py FOLDER kill|signal|signal-in-evaluation|no N STRATEGY: after N updates. The end writes the weights.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import trainer
from tests.distributed.checks_checkpoints import Training
from trainer.models.sharded import gather


def stop() -> None:
    if how == "signal-in-evaluation":
        return
    if run.rank == run.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGTERM)


folder, how, after, strategy = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
trainer.report_failures()
training = Training(strategy, depends_on_ranks=False)
run = training.run
# The interval shows that it is the signal which saves.
checkpoints = training.checkpoints(folder, **({"every_updates": 1} if how == "kill" else {"every_epochs": 100}))
if how == "signal-in-evaluation":
    for _ in run.epochs(3):
        for inputs, targets in training.loader:
            run.backward(F.cross_entropy(training.forward(inputs), targets))
            if run.sync_gradients:
                training.optimizer.step()
                training.optimizer.zero_grad()
                training.totals["updates"] += 1
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2)  # an evaluation, in which the ranks do not talk
weights = list(map(gather, training.train(after, stop)))
if run.is_root:
    torch.save(weights, folder / "weights.pt")
run.print(f"world size {run.world_size}, {training.totals['updates']} updates, attempt {checkpoints.attempt}")

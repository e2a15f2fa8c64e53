"""Ends without `average_weights`, on rank 0 at once and on rank 1 later, while weights are on their way."""

from __future__ import annotations

import sys
import time

import torch

import trainer

run = trainer.init(sys.argv[1], sync_every=2, full_updates=0, sync_overlap=True, device="cpu")
module = torch.nn.Linear(4, 2)
model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
for _ in range(6):
    time.sleep(0.3 * run.rank)
    optimizer.zero_grad()
    run.backward(model(torch.randn(8, 4)).sum())
    optimizer.step()

"""Horovod's own calls beside trainer: horovodrun -np 4 python examples/coming_from/horovod_beside.py."""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import trainer

os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # before init: process sets may then be added
run = trainer.init("horovod")
import horovod.torch as hvd  # noqa: E402 (after init, which sets it up for this host and calls hvd.init)

evens = hvd.add_process_set(range(0, hvd.size(), 2))  # every rank adds every set
torch.manual_seed(0)
data = torch.randn(1200, 20)
dataset = TensorDataset(data, (data @ torch.randn(20, 3)).argmax(1))
loader = run.loader(dataset, batch_size=60)
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = run.prepare(model, optimizer)

for epoch in run.epochs(2):
    losses = run.mean()
    for inputs, targets in loader:
        # Every rank gets a part of every rank's batch.
        inputs, targets = hvd.alltoall(inputs, name="inputs"), hvd.alltoall(targets, name="targets")
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        run.backward(loss)
        optimizer.step()
        losses.add(loss)
    run.print(f"epoch {epoch}: loss {losses.read():.8f}")
    if evens.included():
        ranks = hvd.allgather(torch.tensor([hvd.rank()]), process_set=evens, name="evens")
        run.print(f"ranks of the process set: {ranks.tolist()}")
run.barrier()  # no rank leaves the job while others are within a call of theirs

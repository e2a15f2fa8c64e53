"""DDP's, Fabric's and Accelerate's training with trainer: torchrun --nproc-per-node 2 examples/coming_from/after.py."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import trainer

shuffle = "--no-shuffle" not in sys.argv
run = trainer.init()
torch.manual_seed(0)
data = torch.randn(1200, 20)
dataset = TensorDataset(data, (data @ torch.randn(20, 3)).argmax(1))
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))

loader = run.loader(dataset, batch_size=50, shuffle=shuffle)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = run.prepare(model, optimizer)

for epoch in run.epochs(2):
    losses = run.mean()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        run.backward(loss)
        optimizer.step()
        losses.add(loss)
    run.print(f"epoch {epoch}: loss {losses.read():.8f}")

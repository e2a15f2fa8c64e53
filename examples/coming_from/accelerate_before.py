"""A training with Accelerate: torchrun --nproc-per-node 2 examples/coming_from/accelerate_before.py."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

shuffle = "--no-shuffle" not in sys.argv
accelerator = Accelerator()
torch.manual_seed(0)
data = torch.randn(1200, 20)
dataset = TensorDataset(data, (data @ torch.randn(20, 3)).argmax(1))
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))

loader = DataLoader(dataset, batch_size=50, shuffle=shuffle)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(2):
    total = torch.zeros((), device=accelerator.device)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        total += loss.detach()
    mean = accelerator.reduce(total / len(loader), reduction="mean")
    accelerator.print(f"epoch {epoch}: loss {mean:.8f}")
accelerator.end_training()

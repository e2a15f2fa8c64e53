"""A training with Lightning Fabric: torchrun --nproc-per-node 2 examples/coming_from/fabric_before.py."""

import sys

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

shuffle = "--no-shuffle" not in sys.argv
fabric = Fabric(devices=2, strategy="ddp")
fabric.launch()
torch.manual_seed(0)
data = torch.randn(1200, 20)
dataset = TensorDataset(data, (data @ torch.randn(20, 3)).argmax(1))
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))

loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=50, shuffle=shuffle))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)

for epoch in range(2):
    total = torch.zeros((), device=fabric.device)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        total += loss.detach()
    mean = fabric.all_reduce(total / len(loader), reduce_op="mean")
    fabric.print(f"epoch {epoch}: loss {mean:.8f}")
torch.distributed.destroy_process_group()

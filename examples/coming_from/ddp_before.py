"""A training with DistributedDataParallel: torchrun --nproc-per-node 2 examples/coming_from/ddp_before.py."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

shuffle = "--no-shuffle" not in sys.argv
gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if gpu else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
torch.manual_seed(0)
data = torch.randn(1200, 20)
dataset = TensorDataset(data, (data @ torch.randn(20, 3)).argmax(1))
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3)).to(device)

sampler: DistributedSampler[object] = DistributedSampler(dataset, shuffle=shuffle)
loader = DataLoader(dataset, batch_size=50, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
ddp_model = DistributedDataParallel(model)

for epoch in range(2):
    sampler.set_epoch(epoch)
    total = torch.zeros((), device=device)
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp_model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {total.item() / len(loader) / dist.get_world_size():.8f}", flush=True)
dist.destroy_process_group()

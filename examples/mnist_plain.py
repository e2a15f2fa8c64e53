"""The training of mnist.py by hand, in the way Horovod's users write it today. Read the two side by side.

python examples/mnist_plain.py
horovodrun -np 2 python examples/mnist_plain.py

It leaves out what mnist.py has beyond the training itself: warm-up and decay of the learning rate, the run's
record, and a tail that is neither padded nor counted twice (DistributedSampler repeats samples to fill it).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

from examples.networks import NETWORKS

# The PyPI wheel of Open MPI looks for itself where it was built, and only its own mpirun tells it better.
if Path(sys.prefix, "lib", "libmpi.so.40").exists():
    os.environ.setdefault("OPAL_PREFIX", sys.prefix)

import horovod.torch as hvd

parser = argparse.ArgumentParser(
    usage="%(prog)s …", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
)
parser.add_argument("--epochs", type=int, default=1, metavar="N", help="(default: %(default)s)")
parser.add_argument("--lr", type=float, default=0.1, help="with --batch-size, for one rank (default: %(default)s)")
parser.add_argument("--momentum", type=float, default=0.9, metavar="M", help="of SGD (default: %(default)s)")
parser.add_argument("--network", choices=NETWORKS, default="default", help="large: 25 MB (default: %(default)s)")
parser.add_argument(
    "--data-dir", type=Path, default=Path("data"), metavar="DIR", help="holds MNIST/raw (default: %(default)s)"
)
parser.add_argument("--batch-size", type=int, metavar="N", help="per rank (default: 64 of all ranks)")
parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")

args = parser.parse_args()

hvd.init()
device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if hvd.local_rank() == 0:  # of the ranks of a host, one downloads what is missing
    datasets.MNIST(args.data_dir, download=True)
hvd.barrier()
transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
train = datasets.MNIST(args.data_dir, train=True, transform=transform)
test = datasets.MNIST(args.data_dir, train=False, transform=transform)
train_sampler: DistributedSampler[object] = DistributedSampler(
    train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed
)
test_sampler: DistributedSampler[object] = DistributedSampler(
    test, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
)
train_loader = DataLoader(train, batch_size=args.batch_size or max(1, 64 // hvd.size()), sampler=train_sampler)
test_loader = DataLoader(test, batch_size=1000, sampler=test_sampler)

torch.manual_seed(args.seed)
model = NETWORKS[args.network]().to(device)
lr = args.lr * hvd.size() if args.batch_size else args.lr
optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=args.momentum)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def average(value: float, name: str) -> float:
    """The mean of all ranks' values."""
    return float(hvd.allreduce(torch.tensor(value), name=name))


for epoch in range(1, args.epochs + 1):
    train_sampler.set_epoch(epoch)
    started = time.perf_counter()
    model.train()
    total = 0.0
    for images, labels in train_loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
    train_loss = average(total / len(train_loader), "train_loss")
    seconds = time.perf_counter() - started

    model.eval()
    hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)  # BatchNorm's are each rank's own
    total, correct, samples = 0.0, 0, len(test_sampler)
    with torch.no_grad():
        for images, labels in test_loader:
            images, labels = images.to(device), labels.to(device)
            logits = model(images)
            total += F.cross_entropy(logits, labels, reduction="sum").item()
            correct += int((logits.argmax(dim=1) == labels).sum())
    test_loss, accuracy = average(total / samples, "test_loss"), average(correct / samples, "accuracy")
    if hvd.rank() == 0:
        print(
            f"epoch {epoch}/{args.epochs}: loss {train_loss:.4f}, validation loss {test_loss:.4f}, "
            f"accuracy {100 * accuracy:.2f} %, evaluated {samples * hvd.size()}/{len(test)}, "
            f"{seconds:.2f} s ({len(train_sampler) * hvd.size() / seconds:,.0f} samples/s)",
            flush=True,
        )

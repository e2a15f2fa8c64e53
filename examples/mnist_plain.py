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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

# The PyPI wheel of Open MPI looks for itself where it was built, and only its own mpirun tells it better.
if Path(sys.prefix, "lib", "libmpi.so.40").exists():
    os.environ.setdefault("OPAL_PREFIX", sys.prefix)

import horovod.torch as hvd


class DefaultNetwork(nn.Module):
    """Two convolutions and two linear layers, 97,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5)
        self.fc1 = nn.Linear(32 * 4 * 4, 160)
        self.fc2 = nn.Linear(160, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images (samples, 1, 28, 28) to logits (samples, 10)."""
        x = F.relu(F.max_pool2d(self.conv1(images), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.dropout(x.flatten(1), 0.25, training=self.training)
        logits: Tensor = self.fc2(F.relu(self.fc1(x)))
        return logits


class TutorialNetwork(nn.Module):
    """The 21,840 parameters of the network in Horovod's own MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images (samples, 1, 28, 28) to logits (samples, 10)."""
        x = F.relu(F.max_pool2d(self.conv1(images), 2))
        x = F.relu(F.max_pool2d(self.drop(self.conv2(x)), 2))
        x = F.dropout(F.relu(self.fc1(x.flatten(1))), training=self.training)
        logits: Tensor = self.fc2(x)
        return logits


NETWORKS = {"default": DefaultNetwork, "tutorial": TutorialNetwork}
EVAL_BATCH_SIZE = 1000


def parse_args() -> argparse.Namespace:
    """The command line; `--help` shows it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=100, metavar="N", help="per rank (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, metavar="LR", help="for one rank (default: %(default)s)")
    parser.add_argument("--momentum", type=float, default=0.9, metavar="M", help="of SGD (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--network", default="default", choices=list(NETWORKS), help="(default: %(default)s)")
    parser.add_argument(
        "--data-dir", type=Path, default=Path("data"), metavar="DIR", help="holds MNIST/raw (default: %(default)s)"
    )
    return parser.parse_args()


def load_mnist(data_dir: Path) -> tuple[Any, Any]:
    """The training and the test set; one rank per host downloads what is missing."""
    if hvd.local_rank() == 0:
        datasets.MNIST(data_dir, download=True)
    hvd.barrier()
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train = datasets.MNIST(data_dir, train=True, transform=transform)
    return train, datasets.MNIST(data_dir, train=False, transform=transform)


def average(value: float, name: str) -> float:
    """The mean of all ranks' values."""
    return float(hvd.allreduce(torch.tensor(value), name=name))


def train_epoch(model: nn.Module, optimizer: Optimizer, loader: DataLoader[Any], device: torch.device) -> float:
    """One pass over this rank's samples; returns the mean loss over all ranks."""
    model.train()
    total = 0.0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return average(total / len(loader), "train_loss")


def evaluate(model: nn.Module, loader: DataLoader[Any], samples: int, device: torch.device) -> tuple[float, float]:
    """Mean loss and accuracy over all ranks' test samples, `samples` on each."""
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            logits = model(images)
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            correct += int((logits.argmax(dim=1) == labels).sum())
    return average(loss / samples, "test_loss"), average(correct / samples, "accuracy")


def main() -> None:
    args = parse_args()
    hvd.init()
    torch.manual_seed(args.seed)
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")

    train, test = load_mnist(args.data_dir)
    train_sampler: Any = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    test_sampler: Any = DistributedSampler(test, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    train_loader: DataLoader[Any] = DataLoader(train, batch_size=args.batch_size, sampler=train_sampler)
    test_loader: DataLoader[Any] = DataLoader(test, batch_size=EVAL_BATCH_SIZE, sampler=test_sampler)

    model = NETWORKS[args.network]().to(device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)
        started = time.perf_counter()
        train_loss = train_epoch(model, optimizer, train_loader, device)
        seconds = time.perf_counter() - started
        loss, accuracy = evaluate(model, test_loader, len(test_sampler), device)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch}/{args.epochs}: loss {train_loss:.4f}, validation loss {loss:.4f}, "
                f"accuracy {100 * accuracy:.2f} %, evaluated {len(test_sampler) * hvd.size()}/{len(test)}, "
                f"{seconds:.2f} s ({len(train_sampler) * hvd.size() / seconds:,.0f} samples/s)",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Time the steps of one rank on a GPU: plain PyTorch, DDP by hand, this library, Fabric or Accelerate.

python benchmarks/device_steps.py plain --model resnet50
torchrun --standalone --nproc-per-node 1 benchmarks/device_steps.py ddp --model gpt
horovodrun -np 1 python benchmarks/device_steps.py ours --model resnet50
python benchmarks/device_steps.py plain --model mnist --data-dir data

ResNet-50 has 128 images in channels-last, the GPT of 124 million parameters 8 × 1,024 tokens and torch.compile. Both
compute in bf16, and all their steps take one batch that is on the device. MNIST is what examples/mnist.py trains, with
256 images per step, in a loop without anything around it. `--device cpu` has small sizes, to rehearse.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import trainer
from benchmarks.common import REPORT_PREFIX
from benchmarks.workloads import mnist_folder
from examples.datasets.mnist import normalize, read_mnist
from examples.networks import DefaultNetwork
from examples.transformer import Transformer

_BLOCKS = 5
RESNET50, GPT, MNIST = "resnet50", "gpt", "mnist"


class Setup(NamedTuple):
    """What is trained, and on what."""

    device: torch.device
    network: nn.Module
    optimizer: Optimizer
    compiled: bool


class Joined(NamedTuple):
    """What a library makes of it."""

    model: nn.Module
    optimizer: Optimizer
    autocast: Callable[[], AbstractContextManager[object]]
    backward: Callable[[Tensor], object] = Tensor.backward


def _normed(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)


class Bottleneck(nn.Module):
    """A block of ResNet-50 (He et al. 2015), with the stride in its 3 × 3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        first, second = (*_normed(inputs, width, 1), nn.ReLU()), (*_normed(width, width, 3, stride), nn.ReLU())
        self.body = nn.Sequential(*first, *second, *_normed(width, 4 * width, 1))
        is_same = stride == 1 and inputs == 4 * width
        self.skip = nn.Identity() if is_same else nn.Sequential(*_normed(inputs, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def resnet50() -> nn.Module:
    """Return ResNet-50 for 1,000 classes: 25.6 million parameters."""
    layers: list[nn.Module] = [*_normed(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if block == 0 and width > 64 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def gpt(width: int, blocks: int, heads: int, length: int, vocabulary: int) -> Transformer:
    """Return a Transformer for a vocabulary of tokens, with one matrix for those that go in and come out."""
    network = Transformer(width, blocks, heads, length)
    network.embedding, network.logits = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
    nn.init.normal_(network.embedding.weight, std=0.02)
    network.logits.weight = network.embedding.weight
    return network


def make(model: str, device: torch.device) -> tuple[Setup, Tensor, Tensor]:
    """Return what is trained, and its batch."""
    torch.manual_seed(0)
    is_whole = device.type == "cuda"
    if model == RESNET50:
        images, side = (128, 224) if is_whole else (2, 32)
        network = resnet50().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = torch.randn(images, 3, side, side, device=device).contiguous(memory_format=torch.channels_last)
        sgd = SGD(network.parameters(), lr=0.05, momentum=0.9)
        return Setup(device, network, sgd, False), inputs, torch.randint(1000, (images,), device=device)
    sizes, samples = ((768, 12, 12, 1024, 50304), 8) if is_whole else ((64, 2, 2, 64, 512), 2)
    network = gpt(*sizes).to(device)
    text = torch.randint(sizes[-1], (samples, sizes[-2] + 1), device=device)
    adam = AdamW(network.parameters(), lr=3e-4, betas=(0.9, 0.95))
    return Setup(device, network, adam, True), text[:, :-1].contiguous(), text[:, 1:].contiguous()


def plain(setup: Setup) -> Joined:
    """Join nothing."""
    model: Any = torch.compile(setup.network) if setup.compiled else setup.network
    autocast = partial(torch.autocast, setup.device.type, torch.bfloat16)
    return Joined(model, setup.optimizer, autocast)


def ddp(setup: Setup) -> Joined:
    """Join through DistributedDataParallel."""
    dist.init_process_group("nccl" if setup.device.type == "cuda" else "gloo")
    joined = plain(setup)
    return joined._replace(model=nn.parallel.DistributedDataParallel(joined.model))


def ours(setup: Setup) -> Joined:
    """Join through the library's handle, with the strategy of the launcher."""
    run = trainer.init(device=setup.device.type, precision="bf16", compile=setup.compiled)
    model, optimizer = run.prepare(setup.network, setup.optimizer)
    return Joined(model, optimizer, run.autocast, run.backward)


def fabric(setup: Setup) -> Joined:
    """Join through Lightning Fabric's strategy ddp."""
    from lightning_fabric import Fabric

    made = Fabric(accelerator=setup.device.type, strategy="ddp", devices=1, precision="bf16-mixed")
    made.launch()
    network: Any = torch.compile(setup.network) if setup.compiled else setup.network
    model, optimizer = made.setup(network, setup.optimizer)
    return Joined(model, optimizer, nullcontext, made.backward)


def accelerate(setup: Setup) -> Joined:
    """Join through Hugging Face Accelerate."""
    from accelerate import Accelerator

    backend = "inductor" if setup.compiled else None
    made = Accelerator(cpu=setup.device.type == "cpu", mixed_precision="bf16", dynamo_backend=backend)
    model, optimizer = made.prepare(setup.network, setup.optimizer)
    return Joined(model, optimizer, nullcontext, made.backward)


CONTESTANTS = {one.__name__: one for one in (plain, ddp, ours, fabric, accelerate)}


def measure(joined: Joined, inputs: Tensor, targets: Tensor, steps: int) -> dict[str, float]:
    """Return the median milliseconds of a step over blocks of steps, and the first and the last loss."""
    losses: list[float] = []
    seconds = []
    for _ in range(1 + _BLOCKS):  # the first warms up
        started = time.perf_counter()
        for _ in range(steps):
            joined.optimizer.zero_grad()
            with joined.autocast():
                loss = F.cross_entropy(joined.model(inputs).flatten(0, -2), targets.flatten())
            joined.backward(loss)
            joined.optimizer.step()
        losses.append(loss.item())  # waits for the device
        seconds.append((time.perf_counter() - started) / steps)
    return {"ms/step": 1e3 * statistics.median(seconds[1:]), "first loss": losses[0], "last loss": losses[-1]}


def train_mnist(data_dir: Path, device: torch.device, epochs: int, batch: int = 256) -> dict[str, float]:
    """Train examples/mnist.py's network on images that are on the device; return the seconds of an epoch."""
    torch.manual_seed(0)
    train, test = read_mnist(mnist_folder(data_dir))
    images, labels = train.inputs.to(device), train.targets.to(device)
    model = DefaultNetwork().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    seconds = []
    for _ in range(epochs):
        started = time.perf_counter()
        for index in torch.randperm(len(labels), device=device).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(model(normalize(images[index])), labels[index]).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    with torch.inference_mode():
        right = model.eval()(normalize(test.inputs.to(device))).argmax(1) == test.targets.to(device)
    return {"s/epoch": statistics.median(seconds[1:] or seconds), "accuracy": right.float().mean().item()}


def main() -> None:
    trainer.report_failures()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("contestant", choices=CONTESTANTS)
    add("--model", choices=(RESNET50, GPT, MNIST), required=True)
    add("--device", type=torch.device, default=torch.device("cuda"), help="(default: %(default)s)")
    add("--steps", type=int, default=20, metavar="N", help="of each of the five blocks (default: %(default)s)")
    add("--epochs", type=int, default=4, metavar="N", help="of MNIST (default: %(default)s)")
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="(default: %(default)s)")
    args = parser.parse_args()
    if args.model == MNIST:
        found = train_mnist(args.data_dir, args.device, args.epochs)
    else:
        setup, inputs, targets = make(args.model, args.device)
        found = measure(CONTESTANTS[args.contestant](setup), inputs, targets, args.steps)
    print(REPORT_PREFIX + json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Pipeline parallelism: a network divided into stages, one rank each, with micro-batches that keep the stages busy.

    horovodrun -np 2 python examples/pipeline.py               # 2 stages
    horovodrun -np 4 python examples/pipeline.py               # 4 stages
    horovodrun -np 4 python examples/pipeline.py --stages 2    # 2 stages × 2 replicas: with data parallelism

Data parallelism gives every rank the whole network and a part of the batch; here every rank has a part of the network
and sees the whole batch. Stages exchange activations and their gradients (torch.distributed.pipelining, schedule GPipe:
Huang et al., "GPipe", NeurIPS 2019, arXiv:1811.06965); replicas of a stage average its gradients. The weights are those
of one process with the global batch. It pays where a network does not fit on one GPU, and not before.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

from examples.datasets import DATASETS, load_dataset
from trainer import ConfigError, InMemory, ShardedLoader, World, current_world, report_failures
from trainer.cluster.environment import set_default
from trainer.cluster.output import print_line
from trainer.cluster.process_group import join_group
from trainer.tuning import tune


def make_layers() -> list[nn.Module]:
    """Return a network for MNIST as a list of layers: images (samples, 1, 28, 28) to logits (samples, 10)."""
    torch.manual_seed(0)
    return [
        nn.Conv2d(1, 16, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 160),
        nn.ReLU(),
        nn.Linear(160, 10),
    ]


# First layer of each stage but the first, by number of stages; the first convolution takes the most time.
CUTS = {1: (), 2: (3,), 4: (3, 6, 8)}


class Pipeline:
    """This rank's stage of the network, and its process groups.

    Args:
        world: ranks are numbered replica by replica: with 2 stages, ranks 0 and 1 are the first replica.
        stages: number of stages; a key of `CUTS`.
        microbatches: parts of a batch that are in different stages at the same time.
    """

    def __init__(self, world: World, stages: int, microbatches: int) -> None:
        self.replicas, self.stages = world.size // stages, stages
        self.replica, self.stage = divmod(world.rank, stages)
        self._layers, cuts = make_layers(), [0, *CUTS[stages], None]
        self.part = nn.Sequential(*self._layers[cuts[self.stage] : cuts[self.stage + 1]]).to(world.device)
        self._numbers = range(len(self._layers))[cuts[self.stage] : cuts[self.stage + 1]]
        # torch.distributed requires every rank to create every group, in the same order.
        groups: dict[str, Any] = {}
        for replica in range(self.replicas):
            group = dist.new_group([replica * stages + stage for stage in range(stages)])
            groups |= {"pipeline": group} if replica == self.replica else {}
        for stage in range(stages):
            group = dist.new_group([replica * stages + stage for replica in range(self.replicas)])
            groups |= {"replicas": group} if stage == self.stage else {}
        self._replicas_group = groups["replicas"]
        self._schedule = None
        if stages > 1:
            runner = PipelineStage(self.part, self.stage, stages, world.device, group=groups["pipeline"])
            # The mean of the micro-batches' mean losses is the batch's, since they are of one size.
            self._schedule = ScheduleGPipe(runner, microbatches, loss_fn=F.cross_entropy)

    def backward(self, images: Tensor, targets: Tensor) -> float | None:
        """Compute the gradients of the mean loss over all replicas' batches; return the loss on the last stage."""
        loss = self._one_replica(images, targets)
        if self.replicas > 1:
            for parameter in self.part.parameters():
                assert parameter.grad is not None  # noqa: S101 (a stage without work would be a wrong cut)
                dist.all_reduce(parameter.grad, group=self._replicas_group)
                parameter.grad /= self.replicas
        return loss

    def _one_replica(self, images: Tensor, targets: Tensor) -> float | None:
        if self._schedule is None:
            loss = F.cross_entropy(self.part(images), targets)
            loss.backward()
            return float(loss.detach())
        losses: list[Tensor] = []
        first, last = self.stage == 0, self.stage == self.stages - 1
        self._schedule.step(*([images] if first else []), target=targets if last else None, losses=losses)
        return float(torch.stack(losses).mean().detach()) if last else None

    def weights(self) -> dict[str, Tensor]:
        """Return the whole network's weights on every rank, gathered from the stages of the first replica."""
        state = {
            f"{number}.{name}": value.detach().cpu()
            for number, layer in zip(self._numbers, self.part, strict=True)
            for name, value in layer.state_dict().items()
        }
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, state if self.replica == 0 else {})
        return {name: value for part in parts for name, value in part.items()}


def train(pipeline: Pipeline, data: InMemory, options: argparse.Namespace, world: World) -> None:
    """Train by SGD over whole global batches; print how many samples of an epoch form no whole batch."""
    optimizer = torch.optim.SGD(pipeline.part.parameters(), lr=options.lr, momentum=0.9)
    shard = World(rank=pipeline.replica, size=pipeline.replicas, device=world.device)
    loader = ShardedLoader(data, options.batch_size, world=shard)
    steps, left = divmod(len(data), options.batch_size * pipeline.replicas)
    for epoch in range(1, options.epochs + 1):
        started, losses = time.perf_counter(), []
        for images, targets in islice(loader, steps):
            optimizer.zero_grad()
            losses.append(pipeline.backward(images, targets))
            optimizer.step()
        if world.rank == pipeline.stages - 1:  # the first replica's last stage, which has the loss
            seconds = time.perf_counter() - started
            rest = f", {left} samples left out (no whole batch)" if left else ""
            mean = sum(loss or 0.0 for loss in losses) / len(losses)
            print_line(f"epoch {epoch}/{options.epochs}: loss {mean:.4f}, {seconds:.2f} s{rest}")


def accuracy(weights: dict[str, Tensor], data: InMemory) -> float:
    """Return the accuracy of the whole network in one process, 0 to 1."""
    network = nn.Sequential(*make_layers())
    network.load_state_dict(weights)
    loader = ShardedLoader(data, 1000, shuffle=False, world=World())
    with torch.no_grad():
        right = sum(int((network(images).argmax(1) == targets).sum()) for images, targets in loader)
    return right / len(data)


def main() -> int:
    report_failures()
    options = _parse_args()
    world = current_world(options.device)
    stages = options.stages or world.size
    if stages not in CUTS or world.size % stages:
        valid = ", ".join(str(number) for number in CUTS if world.size % number == 0)
        raise ConfigError(f"--stages is {stages}; with {world.size} ranks, valid are {valid}")
    if options.batch_size % options.microbatches:
        raise ConfigError(
            f"--batch-size is {options.batch_size}; it must be a multiple of --microbatches, {options.microbatches}"
        )
    tune(world)
    set_default("TORCH_CPP_LOG_LEVEL", "ERROR")
    _, leave = join_group(world)
    pipeline = Pipeline(world, stages, options.microbatches)
    if world.is_root:
        print_line(
            f"{stages} stages × {pipeline.replicas} replicas, global batch {options.batch_size * pipeline.replicas}"
        )
    training, test = load_dataset(options.dataset, options.data_dir, world, lambda text: _all_gather(text, world))
    train(pipeline, training, options, world)
    weights = pipeline.weights()
    if world.is_root:
        if options.save:
            torch.save(weights, options.save)
        print_line(f"test accuracy {100 * accuracy(weights, test):.2f} % (evaluated {len(test)}/{len(test)})")
    dist.barrier()
    leave()
    return 0


def _all_gather(text: str | None, world: World) -> list[str | None]:
    texts: list[str | None] = [None] * world.size
    dist.all_gather_object(texts, text)
    return texts


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--stages", type=int, metavar="1|2|4", help="(default: as many as there are ranks)")
    parser.add_argument("--microbatches", type=int, default=4, metavar="M", help="per batch (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=100, metavar="B", help="per replica (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.02, metavar="RATE", help="(default: %(default)s)")
    parser.add_argument("--dataset", default="auto", metavar="|".join(DATASETS), help="(default: %(default)s)")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: %(default)s)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="the weights, for torch.load")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

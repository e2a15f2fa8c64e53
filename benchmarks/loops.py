"""Train a workload on batches cut from memory with a hand-written loop, over one of several libraries.

horovodrun -np 2 python benchmarks/loops.py horovod --data-dir data
torchrun --nproc-per-node 2 benchmarks/loops.py ddp --network transformer
.venv-peers/bin/python -m torch.distributed.run --nproc-per-node 2 benchmarks/loops.py fabric --data-dir data
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

import trainer
from benchmarks.common import Joined, train_and_report
from benchmarks.workloads import TUTORIAL, WORKLOADS, Workload
from trainer.cluster.mpi import locate_open_mpi
from trainer.cluster.world import current_world
from trainer.tuning import tune
from trainer.watch.failure import report_failures


def ours(workload: Workload, network: nn.Module, seed: int) -> Joined:
    """Join through the library's handle, which has batches of its own."""
    handle = trainer.init("auto", seed=seed, device="cpu")
    model, optimizer = handle.prepare(network, workload.optimizer(network))
    return Joined(
        rank=handle.rank, size=handle.world_size, model=model, optimizer=optimizer, close=handle.close,
        sum_over_ranks=lambda tensor: handle.all_reduce(tensor, "sum"), backward=handle.backward,
        make_loader=handle.loader,
    )  # fmt: skip


def tuned(workload: Workload, network: nn.Module, seed: int) -> Joined:
    """Join through Horovod, with tuning and grouping as the library chooses them."""
    tune(current_world("cpu"), horovod=True)
    return horovod(workload, network, seed, groups=1)


def horovod(workload: Workload, network: nn.Module, seed: int, groups: int | None = None) -> Joined:
    """Join through Horovod, with its default settings."""
    locate_open_mpi()
    import horovod.torch as hvd

    hvd.init()
    optimizer: Any = workload.optimizer(network)
    # A new optimizer has no state to broadcast. Horovod would make one by a step without gradients, in which AdamW
    # decays the weights.
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters(), groups=groups)
    return Joined(
        rank=hvd.rank(), size=hvd.size(), model=network, optimizer=optimizer,
        sum_over_ranks=lambda tensor: hvd.allreduce(tensor, op=hvd.Sum),
    )  # fmt: skip


def ddp(workload: Workload, network: nn.Module, seed: int) -> Joined:
    """Join through DistributedDataParallel over Gloo."""
    dist.init_process_group("gloo")
    # In all three libraries on DDP: the transformer's buffers are constants.
    model = nn.parallel.DistributedDataParallel(network, broadcast_buffers=False)
    optimizer = workload.optimizer(network)
    rank, size = dist.get_rank(), dist.get_world_size()
    return Joined(rank=rank, size=size, model=model, optimizer=optimizer, sum_over_ranks=_sum, close=_end_with_gloo)


def fabric(workload: Workload, network: nn.Module, seed: int) -> Joined:
    """Join through Lightning Fabric's strategy ddp."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    world, devices = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    strategy = DDPStrategy(broadcast_buffers=False)
    made = Fabric(accelerator="cpu", strategy=strategy, devices=devices, num_nodes=world // devices)
    made.launch()
    model, optimizer = made.setup(network, workload.optimizer(network))
    return Joined(
        rank=made.global_rank, size=made.world_size, model=model, optimizer=optimizer, sum_over_ranks=_sum,
        backward=made.backward, close=_end_with_gloo,
    )  # fmt: skip


def accelerate(workload: Workload, network: nn.Module, seed: int) -> Joined:
    """Join through Hugging Face Accelerate."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    made = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])
    model, optimizer = made.prepare(network, workload.optimizer(network))
    return Joined(
        rank=made.process_index, size=made.num_processes, model=model, optimizer=optimizer, sum_over_ranks=_sum,
        backward=made.backward, close=_end_with_gloo,
    )  # fmt: skip


def limit(workload: Workload, network: nn.Module, seed: int) -> Joined:
    """Join without an exchange: each rank trains for itself, beside the others, with the library's host settings.

    The ranks start each epoch together, because the sum of the losses ends an epoch. That goes through torchrun's
    store, since Horovod, MPI and Gloo each have a thread that wakes up during the steps.
    """
    tune(current_world("cpu"))
    store, rank, size = next(iter(dist.rendezvous("env://")))  # type: ignore[attr-defined]
    rounds = itertools.count()

    def sum_over_ranks(tensor: Tensor) -> Tensor:
        number = next(rounds)
        store.set(f"loss.{number}.{rank}", " ".join(value.hex() for value in tensor.tolist()))
        texts = [store.get(f"loss.{number}.{other}").decode() for other in range(size)]
        values = [[float.fromhex(value) for value in text.split()] for text in texts]
        return torch.tensor(values, dtype=tensor.dtype).sum(dim=0)

    optimizer = workload.optimizer(network)
    return Joined(rank=rank, size=size, model=network, optimizer=optimizer, sum_over_ranks=sum_over_ranks)


def _sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over the ranks of torch.distributed in place, and return it; without a group there is one rank."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def _end_with_gloo() -> NoReturn:
    """End this process without the interpreter's shutdown.

    Gloo's threads outlive the group. One that frees its last tensor during the shutdown aborts the process
    ("terminate called without an active exception").
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


LOOPS: dict[str, Callable[[Workload, nn.Module, int], Joined]] = {
    one.__name__: one for one in (ours, tuned, horovod, ddp, fabric, accelerate, limit)
}


def main() -> None:
    report_failures()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestant", choices=LOOPS)
    parser.add_argument("--network", choices=WORKLOADS, default=TUTORIAL, help="(default: %(default)s)")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    args = parser.parse_args()
    workload = WORKLOADS[args.network]
    network = workload.make(args.seed)
    joined = LOOPS[args.contestant](workload, network, args.seed)
    train_and_report(joined, workload, network, args.data_dir, epochs=args.epochs, seed=args.seed)
    joined.close()


if __name__ == "__main__":
    main()

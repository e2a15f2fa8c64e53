"""Limit: every rank trains a workload for itself, side by side with the others, without exchange.

torchrun --nproc-per-node 2 benchmarks/compute_loop.py --data-dir data

It is the hand-written loop with the library's host settings. The ranks start together and start each epoch together,
because the sum of the losses over the ranks ends an epoch. So an epoch takes as long as the slowest rank computes. The
sum goes through torchrun's store, since Horovod, MPI and Gloo each have a thread that wakes up during the steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks import common
from benchmarks.workloads import WORKLOADS
from trainer.cluster.rendezvous import Rendezvous
from trainer.cluster.world import current_world
from trainer.tuning import tune
from trainer.watch.failure import report_failures


def main() -> None:
    report_failures()
    args = common.loop_parser(__doc__).parse_args()
    world = current_world("cpu")
    tune(world)
    rendezvous = Rendezvous(world)
    workload = WORKLOADS[args.network]
    model = workload.make(args.seed)
    optimizer = workload.optimizer(model)

    def sum_over_ranks(tensor: Tensor) -> Tensor:
        texts = rendezvous.all_gather(" ".join(value.hex() for value in tensor.tolist()))
        values = [[float.fromhex(value) for value in text.split()] for text in texts]
        return torch.tensor(values, dtype=tensor.dtype).sum(dim=0)

    common.train_and_report(model, optimizer, args, common.RankInfo(world.rank, world.size), sum_over_ranks)
    rendezvous.close()


if __name__ == "__main__":
    main()

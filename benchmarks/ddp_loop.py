"""Hand-written DistributedDataParallel loop over Gloo: trains the tutorial network on batches cut from memory.

torchrun --nproc-per-node 2 benchmarks/ddp_loop.py --data-dir data
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks import common
from trainer.launch.failure import report_failures


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum `tensor` over the ranks in place, and return it."""
    dist.all_reduce(tensor)
    return tensor


def main() -> None:
    report_failures()
    args = common.loop_parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(common.make_network(args.seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=common.LEARNING_RATE, momentum=common.MOMENTUM)
    rank_info = common.RankInfo(dist.get_rank(), dist.get_world_size())
    common.train_and_report(model, optimizer, args, rank_info, sum_over_ranks)
    dist.destroy_process_group()
    # Gloo's threads outlive the group. One that frees its last tensor while the interpreter shuts down aborts the
    # process ("terminate called without an active exception"), so the interpreter's shutdown is skipped.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

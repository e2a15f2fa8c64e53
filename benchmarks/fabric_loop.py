"""Loop over Lightning Fabric's strategy ddp: trains the tutorial network on batches cut from memory.

.venv-peers/bin/torchrun --nproc-per-node 2 benchmarks/fabric_loop.py --data-dir data
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import Tensor

from benchmarks import common
from trainer.launch.failure import report_failures


def main() -> None:
    report_failures()
    args = common.loop_parser(__doc__).parse_args()
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]))
    fabric.launch()
    network = common.make_network(args.seed)
    model, optimizer = fabric.setup(
        network, torch.optim.SGD(network.parameters(), lr=common.LEARNING_RATE, momentum=common.MOMENTUM)
    )

    def sum_over_ranks(tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    rank_info = common.RankInfo(fabric.global_rank, fabric.world_size)
    common.train_and_report(model, optimizer, args, rank_info, sum_over_ranks, fabric.backward)
    dist.destroy_process_group()
    # As in ddp_loop.py: Gloo's threads outlive the group.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

"""Loop over Lightning Fabric's strategy ddp: trains the tutorial network on batches cut from memory.

.venv-peers/bin/python -m torch.distributed.run --nproc-per-node 2 benchmarks/fabric_loop.py --data-dir data
"""

from __future__ import annotations

import os

import torch
from lightning_fabric import Fabric

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
    rank_info = common.RankInfo(fabric.global_rank, fabric.world_size)
    common.train_and_report(model, optimizer, args, rank_info, common.sum_over_group, fabric.backward)
    common.end_with_gloo()


if __name__ == "__main__":
    main()

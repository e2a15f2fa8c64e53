"""Loop over Lightning Fabric's strategy ddp: trains a workload on batches cut from memory.

.venv-peers/bin/python -m torch.distributed.run --nproc-per-node 2 benchmarks/fabric_loop.py --data-dir data
"""

from __future__ import annotations

import os

from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy

from benchmarks import common
from benchmarks.workloads import WORKLOADS
from trainer.watch.failure import report_failures


def main() -> None:
    report_failures()
    args = common.loop_parser(__doc__).parse_args()
    strategy = DDPStrategy(broadcast_buffers=False)  # the transformer's are constants
    world, devices = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=devices, num_nodes=world // devices)
    fabric.launch()
    workload = WORKLOADS[args.network]
    network = workload.make(args.seed)
    model, optimizer = fabric.setup(network, workload.optimizer(network))
    rank_info = common.RankInfo(fabric.global_rank, fabric.world_size)
    common.train_and_report(model, optimizer, args, rank_info, common.sum_over_group, fabric.backward, network=network)
    common.end_with_gloo()


if __name__ == "__main__":
    main()

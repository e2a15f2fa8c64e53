"""Hand-written DistributedDataParallel loop over Gloo: trains a workload on batches cut from memory.

torchrun --nproc-per-node 2 benchmarks/ddp_loop.py --data-dir data
"""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import common
from benchmarks.workloads import WORKLOADS
from trainer.watch.failure import report_failures


def main() -> None:
    report_failures()
    args = common.loop_parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    workload = WORKLOADS[args.network]
    network = workload.make(args.seed)
    model = DistributedDataParallel(network, broadcast_buffers=False)  # the transformer's are constants
    optimizer = workload.optimizer(network)
    rank_info = common.RankInfo(dist.get_rank(), dist.get_world_size())
    common.train_and_report(model, optimizer, args, rank_info, common.sum_over_group, network=network)
    common.end_with_gloo()


if __name__ == "__main__":
    main()

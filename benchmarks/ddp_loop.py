"""Hand-written DistributedDataParallel loop over Gloo: trains the tutorial network on batches cut from memory.

torchrun --nproc-per-node 2 benchmarks/ddp_loop.py --data-dir data
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import common
from trainer.launch.failure import report_failures


def main() -> None:
    report_failures()
    args = common.loop_parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(common.make_network(args.seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=common.LEARNING_RATE, momentum=common.MOMENTUM)
    rank_info = common.RankInfo(dist.get_rank(), dist.get_world_size())
    common.train_and_report(model, optimizer, args, rank_info, common.sum_over_group)
    common.end_with_gloo()


if __name__ == "__main__":
    main()

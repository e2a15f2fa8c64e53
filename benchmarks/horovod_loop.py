"""Hand-written Horovod loop: trains the tutorial network on batches cut from memory.

python benchmarks/horovod_loop.py --data-dir data
horovodrun -np 2 python benchmarks/horovod_loop.py --data-dir data
horovodrun -np 2 python benchmarks/horovod_loop.py --data-dir data --tuned    # the library's settings
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks import common
from trainer.launch.failure import report_failures
from trainer.launch.mpi import locate_open_mpi
from trainer.launch.world import current_world
from trainer.tuning import tune


def main() -> None:
    report_failures()
    parser = common.loop_parser(__doc__)
    parser.add_argument("--tuned", action="store_true", help="tuning and grouping as the library chooses them")
    args = parser.parse_args()
    if args.tuned:
        tune(current_world("cpu"), horovod=True)
    locate_open_mpi()
    import horovod.torch as hvd

    hvd.init()
    model = common.make_network(args.seed)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=common.LEARNING_RATE, momentum=common.MOMENTUM)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), groups=1 if args.tuned else None
    )

    def sum_over_ranks(tensor: Tensor) -> Tensor:
        summed: Tensor = hvd.allreduce(tensor, op=hvd.Sum)
        return summed

    common.train_and_report(model, optimizer, args, common.RankInfo(hvd.rank(), hvd.size()), sum_over_ranks)


if __name__ == "__main__":
    main()

"""Hand-written Horovod loop: trains a workload on batches cut from memory.

python benchmarks/horovod_loop.py --data-dir data
horovodrun -np 2 python benchmarks/horovod_loop.py --data-dir data
horovodrun -np 2 python benchmarks/horovod_loop.py --data-dir data --tuned    # the library's settings
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks import common
from benchmarks.workloads import WORKLOADS
from trainer.cluster.mpi import locate_open_mpi
from trainer.cluster.world import current_world
from trainer.tuning import tune
from trainer.watch.failure import report_failures


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
    workload = WORKLOADS[args.network]
    model = workload.make(args.seed)
    optimizer: Any = workload.optimizer(model)
    # A new optimizer has no state to broadcast. Horovod would make one by a step without gradients, in which AdamW
    # decays the weights.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), groups=1 if args.tuned else None
    )

    def sum_over_ranks(tensor: Tensor) -> Tensor:
        summed: Tensor = hvd.allreduce(tensor, op=hvd.Sum)
        return summed

    common.train_and_report(model, optimizer, args, common.RankInfo(hvd.rank(), hvd.size()), sum_over_ranks)


if __name__ == "__main__":
    main()

"""Loop of one's own on the library's handle: trains a workload on the handle's batches.

python benchmarks/handle_loop.py --network transformer
horovodrun -np 2 python benchmarks/handle_loop.py --network transformer
"""

from __future__ import annotations

import trainer
from benchmarks import common
from benchmarks.workloads import WORKLOADS
from trainer.watch.failure import report_failures


def main() -> None:
    report_failures()
    args = common.loop_parser(__doc__).parse_args()
    handle = trainer.init("auto", seed=args.seed, device="cpu")
    workload = WORKLOADS[args.network]
    network = workload.make(args.seed)
    model, optimizer = handle.prepare(network, workload.optimizer(network))
    common.train_and_report(
        model, optimizer, args, common.RankInfo(handle.rank, handle.world_size),
        sum_over_ranks=lambda tensor: handle.all_reduce(tensor, "sum"), backward=handle.backward,
        network=network, make_loader=handle.loader,
    )  # fmt: skip
    handle.close()


if __name__ == "__main__":
    main()

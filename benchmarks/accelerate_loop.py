"""Loop over Hugging Face Accelerate: trains a workload on batches cut from memory.

.venv-peers/bin/python -m torch.distributed.run --nproc-per-node 2 benchmarks/accelerate_loop.py --data-dir data
"""

from __future__ import annotations

from accelerate import Accelerator, DistributedDataParallelKwargs

from benchmarks import common
from benchmarks.workloads import WORKLOADS
from trainer.watch.failure import report_failures


def main() -> None:
    report_failures()
    args = common.loop_parser(__doc__).parse_args()
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False)  # the transformer's are constants
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp])
    workload = WORKLOADS[args.network]
    network = workload.make(args.seed)
    model, optimizer = accelerator.prepare(network, workload.optimizer(network))
    rank_info = common.RankInfo(accelerator.process_index, accelerator.num_processes)
    common.train_and_report(
        model, optimizer, args, rank_info, common.sum_over_group, accelerator.backward, network=network
    )
    common.end_with_gloo()


if __name__ == "__main__":
    main()

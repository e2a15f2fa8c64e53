"""Loop over Hugging Face Accelerate: trains the tutorial network on batches cut from memory.

.venv-peers/bin/torchrun --nproc-per-node 2 benchmarks/accelerate_loop.py --data-dir data
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from benchmarks import common
from trainer.launch.failure import report_failures


def main() -> None:
    report_failures()
    args = common.loop_parser(__doc__).parse_args()
    accelerator = Accelerator(cpu=True)
    network = common.make_network(args.seed)
    model, optimizer = accelerator.prepare(
        network, torch.optim.SGD(network.parameters(), lr=common.LEARNING_RATE, momentum=common.MOMENTUM)
    )

    def sum_over_ranks(tensor: Tensor) -> Tensor:
        # On one rank it has no process group.
        if accelerator.num_processes > 1:
            dist.all_reduce(tensor)
        return tensor

    rank_info = common.RankInfo(accelerator.process_index, accelerator.num_processes)
    common.train_and_report(model, optimizer, args, rank_info, sum_over_ranks, accelerator.backward)
    accelerator.end_training()
    # As in ddp_loop.py: Gloo's threads outlive the group.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

"""Profiles a training step with torch's profiler: the tutorial network, batch 100, one thread.

python benchmarks/profile_step.py
horovodrun -np 2 python benchmarks/profile_step.py    # rank 0's step, with its exchange

It needs no data, because random images cost the same.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import trainer
from benchmarks.workloads import BATCH_SIZE, LEARNING_RATE, MOMENTUM
from examples.datasets.mnist import normalize
from examples.networks import TutorialNetwork

WARM_UP_STEPS = 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=14, metavar="N", help="operators to show (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=170, metavar="N", help="profiled steps (default: %(default)s)")
    options = parser.parse_args()
    run = trainer.init(device="cpu")
    images = torch.randint(0, 256, (BATCH_SIZE * (WARM_UP_STEPS + options.steps), 1, 28, 28), dtype=torch.uint8)
    data = trainer.InMemory(images, torch.randint(0, 10, (len(images),)), normalize)
    model = TutorialNetwork()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    forward, stepper = run.prepare(model, optimizer)
    torch.set_num_threads(1)
    loader = run.loader(data, BATCH_SIZE)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        stepper.zero_grad()
        run.backward(F.cross_entropy(forward(inputs), targets))
        stepper.step()

    batches = list(loader)
    for inputs, targets in batches[:WARM_UP_STEPS]:
        step(inputs, targets)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for inputs, targets in batches[WARM_UP_STEPS:]:
            step(inputs, targets)
    if run.is_root:
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=options.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A training script for `test_failures`: what goes wrong, on which rank, and with which strategy, are its arguments."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch.nn import functional as F

from examples.strategies import full_name
from tests.distributed.harness import leave_stacks_on_request
from tests.distributed.reference import make_data, make_model, sgd
from trainer import Callback, Trainer, TrainerConfig, TrainerError
from trainer.cluster.environment import read_launch


class Mishap(Callback):
    """Happens on one rank, in the middle of an epoch, while the others wait for its gradients."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind, self.rank = kind, rank
        self.steps = 0

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        """The loss function, which is called in every step."""
        self.steps += 1
        loss = F.cross_entropy(outputs, targets)
        if self.steps == 20 and read_launch().rank == self.rank:
            if self.kind == "bug":
                raise ZeroDivisionError("the user's own bug")
            if self.kind == "mistake":
                raise TrainerError("sample 7 of the dataset has no label; every sample needs one")
            if self.kind == "hang":
                time.sleep(1)  # by then the other ranks wait in this step's all-reduce
                print(f"rank {self.rank} hangs", flush=True)
                time.sleep(3600)
            if self.kind == "exit":
                sys.exit(3)
        return loss


def main() -> None:
    kind, rank, strategy = sys.argv[1], int(sys.argv[2]), [*sys.argv, "auto"][3]
    leave_stacks_on_request(read_launch().rank)
    mishap = Mishap(kind, rank)
    model = make_model(torch.float32)
    config = TrainerConfig(batch_size=4, device="cpu")
    trainer = Trainer(model, sgd(model), mishap, strategy=full_name(strategy), config=config, output=None)
    trainer.fit(make_data(40000, torch.float32), epochs=1)
    print("the epoch ended")


if __name__ == "__main__":
    main()

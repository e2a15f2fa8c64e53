"""For `test_failures`: rank 0 alone calls a model in training mode whose BatchNorm is over the global batch."""

from __future__ import annotations

import torch

import trainer
from tests.distributed.harness import leave_stacks_on_request


def main() -> None:
    run = trainer.init(sync_batch_norm=True, device="cpu")
    leave_stacks_on_request(run.rank)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step, (inputs,) in enumerate(run.loader(torch.utils.data.TensorDataset(torch.randn(80, 4)), batch_size=4)):
        run.backward(model(inputs).square().mean())
        optimizer.step()
        if step == 3 and run.is_root:
            model(torch.randn(5, 4))  # the samples that a GAN's script shows now and then
    print("the epoch ended")


if __name__ == "__main__":
    main()

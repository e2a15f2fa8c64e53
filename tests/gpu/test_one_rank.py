"""Training on one GPU with one rank."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from examples.datasets.digits import load_digits
from examples.mnist import DefaultNetwork
from tests.distributed.harness import run_job
from trainer import Trainer, TrainerConfig, accuracy
from trainer.strategies import has_nccl

MNIST = ["examples/mnist.py", "--dataset", "digits", "--epochs", "1", "--output", "none", "--device", "cuda"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_digits_are_learned_on_the_gpu(precision: str) -> None:
    torch.manual_seed(0)
    train, test = load_digits()
    model = DefaultNetwork()
    config = TrainerConfig(device="cuda", precision=precision, batch_size=50)
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), F.cross_entropy, strategy="single",
        config=config, metrics={"accuracy": accuracy}, output=None, progress=False,
    )  # fmt: skip
    before = trainer.evaluate(test).metrics["loss"]
    after = trainer.fit(train, test, epochs=1)[-1].validation
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cuda:0")}
    assert "cuda:0" in trainer.strategy.description
    assert after is not None
    assert after.evaluated == 297
    # An untrained network has a loss of about 2.3.
    assert after.metrics["loss"] < before / 3


def test_horovod_synchronizes_over_nccl() -> None:
    if not has_nccl():
        pytest.skip("this Horovod was built without NCCL")
    outcome = run_job("horovodrun-mpi", 1, [*MNIST, "--strategy", "horovod"])
    assert outcome.code == 0, outcome.output
    assert "Horovod over NCCL (started by MPI), rank 0 of 1" in outcome.output
    assert "evaluated 297/297" in outcome.output

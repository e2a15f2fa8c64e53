"""Trainer in a world of one: the loop does what a loop written by hand does, and says so when it cannot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from tests.unit.blobs import blobs, fitted, make, network, weights
from tests.unit.test_loader import Endless
from trainer import (
    Callback,
    ConfigError,
    EpochRecord,
    FitContext,
    InMemory,
    Trainer,
    TrainerConfig,
    TrainerError,
    accuracy,
)
from trainer.data.shard_plan import permutation


def test_the_loss_falls_and_every_sample_is_trained_on() -> None:
    trainer = make(metrics={"accuracy": accuracy})
    records = trainer.fit(blobs(95), blobs(31), epochs=4)
    losses = [record.train_loss for record in records]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2
    assert [(record.epoch, record.epochs, record.samples, record.world_size) for record in records] == [
        (epoch, 4, 95, 1) for epoch in (1, 2, 3, 4)
    ]
    assert records[-1].validation is not None
    assert records[-1].validation.metrics["accuracy"] > 0.9
    assert records[0].samples_per_s == pytest.approx(95 / records[0].seconds)


@pytest.mark.parametrize("shuffle", [True, False])
def test_fit_is_bit_for_bit_the_loop_that_one_would_write_by_hand(shuffle: bool) -> None:
    data, model = blobs(25), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        order = permutation(25, epoch=epoch, seed=0) if shuffle else torch.arange(25)
        for index in order.split(10):
            optimizer.zero_grad()
            F.cross_entropy(model(data.inputs[index]), data.targets[index]).backward()
            optimizer.step()
    by_hand = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert torch.equal(fitted(data, shuffle=shuffle), by_hand)


@pytest.mark.parametrize("samples", [60, 67, 61, 41])
@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("extra", [{}, {"clip_norm": 0.1}, {"decay": "cosine"}], ids=["plain", "clipped", "decayed"])
def test_accumulating_k_batches_equals_one_batch_k_times_as_large(
    samples: int, accumulate: int, extra: dict[str, Any]
) -> None:
    # 60 are full updates; 67, 61 and 41 leave a last one of several micro-batches, the last of them short.
    data = blobs(samples)
    added_up = fitted(data, batch_size=10, accumulate=accumulate, **extra)
    at_once = fitted(data, batch_size=10 * accumulate, **extra)
    torch.testing.assert_close(added_up, at_once, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", [1e-3, 1e3])
def test_clipping_limits_the_norm_of_the_gradient_and_leaves_a_smaller_one_alone(norm: float) -> None:
    data = blobs(10)
    before = weights(make())
    moved = {clip: fitted(data, epochs=1, lr=1.0, clip_norm=clip) - before for clip in (norm, None)}
    # One step with a learning rate of 1 and no momentum yet: the weights move by the gradient.
    free = moved[None].norm().item()
    assert moved[norm].norm().item() == pytest.approx(min(norm, free), rel=1e-4)
    torch.testing.assert_close(moved[norm] / moved[norm].norm(), moved[None] / free)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("extra", [{}, {"accumulate": 2}, {"clip_norm": 1.0}], ids=["plain", "accumulated", "clipped"])
def test_half_precision_trains_like_full_precision_about_as_well(precision: str, extra: dict[str, Any]) -> None:
    data = blobs(60, torch.float32)
    kinds: set[torch.dtype] = set()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        kinds.add(outputs.dtype)
        return F.cross_entropy(outputs.float(), targets)

    full = make(network(torch.float32), **extra).fit(data, epochs=3)
    half = make(network(torch.float32), loss, precision=precision, **extra).fit(data, data, epochs=3)
    assert kinds == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert half[-1].train_loss == pytest.approx(full[-1].train_loss, rel=0.05)


def test_a_loss_that_is_no_number_ends_training_and_names_the_epoch() -> None:
    calls = itertools.count(1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        # Three steps an epoch: the fifth is in the second.
        return F.cross_entropy(outputs, targets) * (math.nan if next(calls) == 5 else 1.0)

    with pytest.raises(TrainerError, match=r"the loss turned nan in epoch 2, by sample 30, at learning rate 0\.1"):
        make(loss=loss).fit(blobs(30), epochs=5)


def empty() -> InMemory:
    return InMemory(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize(
    ("train", "validation", "message"),
    [
        (empty(), None, "samples is 0"),
        (blobs(30), empty(), "samples is 0"),
        (Endless(), None, "Trainer takes map-style datasets, and Endless can only"),
        (blobs(30), Endless(), "Trainer takes map-style datasets, and Endless can only"),
    ],
    ids=["nothing to train on", "nothing to validate on", "endless training", "endless validation"],
)
def test_a_dataset_that_cannot_be_used_is_refused_before_the_first_step(
    train: Dataset[Any], validation: Dataset[Any] | None, message: str
) -> None:
    steps: list[int] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        steps.append(len(targets))
        return F.cross_entropy(outputs, targets)

    with pytest.raises(ConfigError, match=message):
        make(loss=loss).fit(train, validation, epochs=1)
    assert steps == []


def is_interrupted(trainer: Trainer) -> None:
    class Fails(Callback):
        def on_epoch_end(self, context: FitContext, record: EpochRecord) -> None:
            raise KeyboardInterrupt

    trainer.callbacks.append(Fails())
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(blobs(30), epochs=2)


def goes_well(trainer: Trainer) -> None:
    trainer.fit(blobs(30), epochs=2)


@pytest.mark.parametrize("fit", [goes_well, is_interrupted])
def test_the_learning_rate_is_restored_after_fit_whatever_its_end(fit: Callable[[Trainer], None]) -> None:
    trainer = make(lr=0.3, scale_lr=True, accumulate=2, decay="cosine")
    fit(trainer)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.3]


@pytest.mark.parametrize(("per", "expected"), [("update", [0.05, 0.0125]), ("epoch", [0.1, 0.05])])
def test_a_scheduler_that_is_handed_in_alone_sets_the_learning_rate(per: str, expected: list[float]) -> None:
    """Of two updates an epoch: a record has the rate of its last one."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    trainer = Trainer(
        model, optimizer, F.cross_entropy, strategy="single", config=TrainerConfig(batch_size=10, device="cpu"),
        lr_scheduler=scheduler, lr_scheduler_per=per, output=None, progress=False,
    )  # fmt: skip
    assert [record.learning_rate for record in trainer.fit(blobs(20), epochs=2)] == expected


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_same_seed_gives_the_same_weights_bit_by_bit_and_another_seed_others(dropout: float) -> None:
    def run(seed: int) -> Tensor:
        model = network(dropout=dropout)
        torch.seed()  # whatever happened in the process before
        return fitted(blobs(35), model=model, seed=seed)

    assert torch.equal(run(5), run(5))
    assert not torch.equal(run(5), run(6))

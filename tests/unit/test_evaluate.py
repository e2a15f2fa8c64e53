"""Trainer.evaluate in a world of one: every sample once, and no trace in what is trained."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.unit.blobs import blobs, make, network, weights
from tests.unit.test_loader import Pairs
from trainer import accuracy


@pytest.mark.parametrize("eval_batch_size", [None, 1, 7, 100])
def test_an_evaluation_counts_every_sample_once(eval_batch_size: int | None) -> None:
    data = blobs(23)
    trainer = make(eval_batch_size=eval_batch_size, metrics={"accuracy": accuracy})
    found = trainer.evaluate(data)
    assert found.evaluated == found.samples == 23
    outputs = network()(data.inputs)
    assert found.metrics["loss"] == pytest.approx(F.cross_entropy(outputs, data.targets).item(), rel=1e-12)
    assert found.metrics["accuracy"] == (outputs.argmax(1) == data.targets).sum().item() / 23


def test_an_evaluation_neither_trains_nor_drops_out() -> None:
    trainer = make(network(dropout=0.9))
    before, noise = weights(trainer), torch.random.get_rng_state()
    assert trainer.evaluate(blobs(20)) == trainer.evaluate(blobs(20))
    assert torch.equal(weights(trainer), before)
    assert torch.equal(torch.random.get_rng_state(), noise)


@pytest.mark.parametrize("in_memory", [True, False])
def test_validating_does_not_change_what_is_trained(in_memory: bool) -> None:
    data = blobs(30)
    held_out = blobs(12) if in_memory else Pairs(blobs(12).inputs, blobs(12).targets)
    with_validation, without = make(network(dropout=0.5)), make(network(dropout=0.5))
    with_validation.fit(data, held_out, epochs=3)
    without.fit(data, epochs=3)
    assert torch.equal(weights(with_validation), weights(without))

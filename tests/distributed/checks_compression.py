"""Compressions under every strategy, powersgd above all, run on every rank of one job; see `jobs`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.checks_every_strategy import (
    BATCH,
    assert_equal_everywhere,
    assert_same_on_all_ranks,
    make_trainer,
)
from tests.distributed.checks_local_training import goes_on
from tests.distributed.reference import assert_equal, make_data, make_model, train_alone
from trainer import ConfigError, init
from trainer.strategies import base
from trainer.strategies.base import Strategy
from trainer.strategies.compress.power_sgd import PowerSGDSynchronizer

WIDE: dict[str, Any] = {"compression": "powersgd:100", "full_updates": 0}


@contextmanager
def all_matrices() -> Iterator[None]:
    """Approximate every matrix, also where that saves nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "PowerSGDSynchronizer", partial(PowerSGDSynchronizer, least_saving=0.0))
        yield


def check_wide_factors_equal_one_process(strategy: Strategy) -> None:
    full = BATCH * strategy.world.size
    for samples, batches, settings in (
        (4 * full + strategy.world.size + 1, 1, {}),
        (2 * full + 1, 1, {"clip_norm": 0.05}),
        (7 * full + 1, 3, {"accumulate": 3}),
    ):
        model, data = make_model(), make_data(samples)
        expected = train_alone(model, data, batch=batches * full, clip_norm=settings.get("clip_norm"))
        with all_matrices():
            make_trainer(strategy, model, **WIDE, **settings).fit(data, epochs=1)
        assert_equal_everywhere(strategy, model, expected, 1e-11)


def check_narrow_factors_train_and_are_the_same_on_all_ranks(strategy: Strategy) -> None:
    data = make_data(20 * BATCH * strategy.world.size + 1, torch.float32)
    model = make_model(torch.float32)
    whole = train_alone(model, data, batch=BATCH * strategy.world.size, epochs=3)
    with all_matrices():
        records = make_trainer(strategy, model, compression="powersgd:1", full_updates=1).fit(data, epochs=3)
    assert records[-1].train_loss < 0.8 * records[0].train_loss
    assert_same_on_all_ranks(strategy, model)
    if strategy.world.size > 1:
        with pytest.raises(AssertionError, match="differs by"):
            assert_equal(model, whole, 1e-3)


def check_compression_goes_on_from_a_checkpoint(strategy: Strategy) -> None:
    with all_matrices():
        goes_on(strategy, compression="powersgd:1", full_updates=2)


def check_powersgd_refuses_what_it_cannot_compress(strategy: Strategy) -> None:
    if strategy.world.size == 1:
        return
    sparse: Any = nn.Embedding(4, 3, sparse=True)
    run = init(strategy, compression="powersgd")
    with pytest.raises(ConfigError, match="sparse gradients, and compression is 'powersgd'"):
        run.prepare(nn.Sequential(sparse), torch.optim.SGD(sparse.parameters(), lr=0.1))
    assert_same_on_all_ranks(strategy, make_model())

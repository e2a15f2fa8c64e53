"""`sync_every` under every strategy, run on every rank of one job; see `jobs`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.distributed import checks_checkpoints
from tests.distributed.checks_checkpoints import Training, interrupt, shared_folder
from tests.distributed.checks_every_strategy import BATCH, assert_same_on_all_ranks, make_trainer
from tests.distributed.reference import assert_equal, fingerprint, make_data, make_model, sgd
from trainer import init
from trainer.strategies.base import Strategy

EVERY, FULL, STEPS = 3, 2, 10


def check_ranks_differ_within_a_round_only(strategy: Strategy) -> None:
    data, model = make_data(STEPS * BATCH * strategy.world.size), make_model()
    run = init(strategy, sync_every=EVERY, full_updates=FULL)
    wrapped, optimizer = run.prepare(model, sgd(model))
    seen = []
    for step, (inputs, targets) in enumerate(run.loader(data, BATCH)):
        optimizer.zero_grad()
        run.backward(F.cross_entropy(wrapped(inputs), targets))
        optimizer.step()
        if step == 5:
            run.average_weights()
        seen.append(len(set(run.all_gather(fingerprint(model)))) == 1)
    # Two synchronous updates; rounds of three, of one that was ended early, and of three; the beginning of another one.
    expected = [True, True, False, False, True, True, False, False, True, False]
    assert seen == (expected if run.world_size > 1 else [True] * STEPS)
    assert_same_on_all_ranks(strategy, model)


def check_compressed_rounds_end_with_the_same_weights_near_the_exact_ones(strategy: Strategy) -> None:
    data, exact = make_data(STEPS * BATCH * strategy.world.size), make_model()
    make_trainer(strategy, exact, sync_every=EVERY, full_updates=FULL).fit(data, epochs=1)
    # In so few rounds, much of what powersgd has left of them has not come yet.
    for compression, tolerance in (("bf16", 5e-3), ("fp16", 1e-3), ("powersgd:2", 0.2)):
        model = make_model()
        make_trainer(strategy, model, sync_every=EVERY, full_updates=FULL, compression=compression).fit(data, epochs=1)
        assert_same_on_all_ranks(strategy, model)
        assert_equal(model, exact, tolerance)


def check_local_training_goes_on_from_a_checkpoint(strategy: Strategy) -> None:
    for compression in ("none", "powersgd:1"):
        goes_on(strategy, sync_every=3, full_updates=1, compression=compression)


def goes_on(strategy: Strategy, **settings: Any) -> None:
    """Train with these settings; an interrupted training ends with the weights of one that was not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks_checkpoints, "init", partial(init, **settings))
        with shared_folder(strategy) as folder:
            training = Training(strategy)
            checkpoints = training.checkpoints(folder, every_updates=2)
            expected = training.train()
            checkpoints.close()
        with shared_folder(strategy) as folder:
            interrupt(strategy, folder, 6, every_updates=2)
            training = Training(strategy)
            checkpoints = training.checkpoints(folder, every_updates=2)
            assert checkpoints.resumed is not None
            found = training.train()
            checkpoints.close()
    # The mean of three equal numbers may differ from them by a rounding, which AdamW divides by a small number.
    tolerance = 1e-9 if strategy.world.size == 3 else 0.0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)

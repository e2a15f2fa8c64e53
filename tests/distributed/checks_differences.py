"""Differences between ranks end the job before the first step, and are named: under every strategy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.distributed.checks_every_strategy import make_trainer
from tests.distributed.reference import make_data, make_model, sgd
from trainer import ConfigError, init
from trainer.strategies.base import Strategy


def check_differences_between_ranks_are_named(strategy: Strategy) -> None:
    last = strategy.world.size - 1
    odd = strategy.world.rank == last
    if last == 0:
        return

    def other_shape() -> None:
        model = nn.Linear(3, 5 if odd else 4)
        init(strategy).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def other_setting() -> None:
        make_trainer(strategy, make_model(), batch_size=5 if odd else 4)

    def other_learning_rate() -> None:
        model = make_model()
        init(strategy).prepare(model, torch.optim.SGD(model.parameters(), lr=0.2 if odd else 0.1))

    def other_frozen() -> None:
        model = make_model()
        next(model.parameters()).requires_grad_(not odd)
        init(strategy).prepare(model, sgd(model))

    def other_length() -> None:
        make_trainer(strategy, make_model()).fit(make_data(9 if odd else 8), epochs=1)

    for mistake, words in (
        (other_shape, ("parameter weight", "[4, 3]", "[5, 3]")),
        (other_setting, ("batch_size", "4", "5")),
        (other_learning_rate, ("lr of the optimizer's group 0", "0.1", "0.2")),
        (other_frozen, ("parameter 0.weight", "frozen")),
        (other_length, ("samples of the dataset", "8", "9")),
    ):
        with pytest.raises(ConfigError) as caught:
            mistake()
        for word in (*words, f"rank {last} on host"):
            assert word in str(caught.value), f"{word!r} is not in {caught.value}"

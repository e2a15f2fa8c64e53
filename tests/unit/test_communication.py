"""Which mechanism the settings stand for, under a strategy of the tests' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.strategies.summing import SummingStrategy
from trainer import ConfigError, World
from trainer.config import RunConfig
from trainer.strategies.buckets import BucketSynchronizer
from trainer.strategies.compress.local_sgd import LocalSynchronizer
from trainer.strategies.compress.power_sgd import PowerSGDSynchronizer
from trainer.strategies.gradients import NamedParameters, Synchronizer


class TwoAlike(SummingStrategy):
    """Rank 0 of two ranks that hold the same numbers."""

    def __init__(self, size: int = 2) -> None:
        super().__init__(World(size=size, local_size=size, launcher="mpirun"))
        self.sent: list[str] = []

    def sum_gradients(self, flat: Tensor) -> None:
        flat.mul_(2)

    def sum_values(self, flat: Tensor) -> None:
        self.sum_gradients(flat)

    def start_gradients(self, flat: Tensor, name: str) -> Callable[[], object]:
        self.sent.append(name)
        return super().start_gradients(flat, name)

    def broadcast_tensors(self, tensors: Any) -> None:
        return


def make(strategy: TwoAlike, model: nn.Module, **settings: Any) -> Synchronizer:
    named: NamedParameters = list(model.named_parameters())
    return strategy.prepare(model, named, RunConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"compression": "powersgd"}, PowerSGDSynchronizer),
        ({"sync_every": 2}, LocalSynchronizer),
        ({"outer_lr": 0.7}, LocalSynchronizer),
        ({"sync_every": 2, "compression": "bf16"}, LocalSynchronizer),
    ],
)
def test_settings_choose_the_mechanism_where_there_are_several_ranks(settings: dict[str, Any], kind: type) -> None:
    assert type(make(TwoAlike(), nn.Linear(2, 2), **settings)) is kind
    assert type(make(TwoAlike(), nn.Linear(2, 2))) is BucketSynchronizer
    assert type(make(TwoAlike(size=1), nn.Linear(2, 2), **settings)) is Synchronizer


@pytest.mark.parametrize("settings", [{"compression": "powersgd"}, {"sync_every": 2}])
def test_sparse_gradients_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"has sparse gradients, and .*, which takes dense ones"):
        make(TwoAlike(), nn.Sequential(nn.Embedding(3, 2, sparse=True)), **settings)


def test_gradients_are_sent_through_the_strategy_under_names_of_each_model() -> None:
    strategy = TwoAlike()
    for _ in range(2):
        model = nn.Linear(40, 30)
        synchronizer = make(strategy, model, compression="powersgd:2", full_updates=1)
        for _ in range(2):
            synchronizer.before_backward()
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)  # of rank 1: the mean is the same
            synchronizer.after_backward()
            synchronizer.complete()
            for parameter in model.parameters():
                torch.testing.assert_close(parameter.grad, torch.ones_like(parameter))
    kinds = [name.split(".")[0] for name in strategy.sent]
    assert kinds == ["whole", "left", "right"] * 2
    assert len(set(strategy.sent)) == 6
    strategy.close()


def test_a_model_that_trains_nothing_has_nothing_to_send() -> None:
    assert type(make(TwoAlike(), nn.ReLU(), sync_every=2)) is Synchronizer

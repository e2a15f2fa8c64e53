"""Metrics and the running loss of a fit: means over all ranks' samples, each counted once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import trainer
from trainer.fit.fit_state import FitState
from trainer.loop.metrics import accuracy


def beside(*other: float) -> FitState:
    """The state of a rank, beside another one's loss and samples, or alone."""
    reduced: list[Tensor] = []

    def all_reduce(tensor: Tensor) -> Tensor:
        reduced.append(tensor)
        return tensor.add_(torch.tensor(other or (0.0, 0.0), dtype=torch.float64))

    world = SimpleNamespace(device=torch.device("cpu"), is_root=True)
    strategy: Any = SimpleNamespace(world=world, all_reduce=all_reduce, reduced=reduced)
    return FitState(strategy, [])


def test_accuracy_is_the_number_of_right_predictions() -> None:
    outputs = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert accuracy(outputs, torch.tensor([1, 0, 0])).item() == 2


def test_a_loss_weighs_batches_by_their_samples() -> None:
    state = beside()
    state.add(torch.tensor(2.0), 3)
    assert state.local_loss_since_last() == 2.0
    state.add(torch.tensor(6.0), 1)
    assert state.mean_loss() == (3.0, 4)
    assert (state.local_loss(), state.local_loss_since_last()) == (3.0, 6.0)


def test_the_mean_is_over_the_samples_of_all_ranks_not_over_the_ranks() -> None:
    # The other rank had 3 samples with a loss of 2 each: (10 + 6) / 4, and not (10 + 2) / 2.
    state = beside(6.0, 3.0)
    state.add(torch.tensor(10.0), 1)
    assert state.mean_loss() == (4.0, 4)
    assert state.local_loss() == 10.0


def test_a_rank_without_samples_takes_the_others_mean() -> None:
    state = beside(6.0, 3.0)
    assert state.local_loss() == 0.0
    assert state.mean_loss() == (2.0, 3)


def test_no_samples_at_all_give_zero_and_not_an_error() -> None:
    assert beside().mean_loss() == (0.0, 0)


def test_sums_stay_exact_beyond_what_float32_holds() -> None:
    state = beside()
    for _ in range(3):
        state.add(torch.tensor(1.0), 2**24 + 1)
    assert state.mean_loss() == (1.0, 3 * (2**24 + 1))


def test_the_running_loss_keeps_no_graph() -> None:
    state = beside()
    state.add(torch.tensor(1.0, requires_grad=True) * 2, 1)
    state.mean_loss()
    assert not state._strategy.reduced[0].requires_grad  # type: ignore[attr-defined]


def test_a_mean_outside_of_the_runs_loaders_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer.init(strategy="single", device="cpu")
    loader = run.prepare(DataLoader(TensorDataset(torch.arange(3.0)), batch_size=2))
    mean = run.mean()
    for (batch,) in loader:
        mean.add(batch.mean())
    assert mean.read() == 1.0
    assert "outside of the run's loaders" not in capsys.readouterr().err
    mean.add(1.0, samples=3)
    mean.add(2.0)
    mean.add(3.0)
    assert mean.read() == 1.6
    assert capsys.readouterr().err.count("add is called outside of the run's loaders") == 1

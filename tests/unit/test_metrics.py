"""Metrics: means over all ranks' samples, each counted once, however unevenly they lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainer.loop.metrics import Sums, accuracy

CPU = torch.device("cpu")


def plus(other: Tensor) -> Callable[[Tensor], Tensor]:
    """An all-reduce with one other rank, which brings `other`."""
    return lambda tensor: tensor.add_(other)


def test_accuracy_is_the_number_of_right_predictions() -> None:
    outputs = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert accuracy(outputs, torch.tensor([1, 0, 0])).item() == 2


def test_means_weigh_batches_by_their_samples() -> None:
    sums = Sums(("loss", "right"), CPU)
    sums.add((torch.tensor(2.0) * 3, torch.tensor(3)), 3)
    sums.add((torch.tensor(6.0) * 1, torch.tensor(0)), 1)
    means, count = sums.mean(lambda tensor: tensor)
    assert means == {"loss": 3.0, "right": 0.75}
    assert count == 4
    assert sums.local_mean("loss") == 3.0
    assert sums.local_mean("right") == 0.75


def test_the_mean_is_over_the_samples_of_all_ranks_not_over_the_ranks() -> None:
    sums = Sums(("loss",), CPU)
    sums.add((torch.tensor(10.0),), 1)
    # The other rank had 3 samples with a loss of 2 each: (10 + 6) / 4, and not (10 + 2) / 2.
    means, count = sums.mean(plus(torch.tensor([6.0, 3.0], dtype=torch.float64)))
    assert means == {"loss": 4.0}
    assert count == 4
    assert sums.local_mean("loss") == 10.0


def test_a_rank_without_samples_takes_the_others_mean() -> None:
    sums = Sums(("loss",), CPU)
    assert sums.local_mean("loss") == 0.0
    assert sums.mean(plus(torch.tensor([6.0, 3.0], dtype=torch.float64))) == ({"loss": 2.0}, 3)


def test_no_samples_at_all_give_zero_and_not_an_error() -> None:
    assert Sums(("loss",), CPU).mean(lambda tensor: tensor) == ({"loss": 0.0}, 0)


def test_counts_stay_exact_beyond_what_float32_holds() -> None:
    sums = Sums(("right",), CPU)
    for _ in range(3):
        sums.add((torch.tensor(2**24 + 1),), 2**24 + 1)
    means, count = sums.mean(lambda tensor: tensor)
    assert count == 3 * (2**24 + 1)
    assert means == {"right": 1.0}


def test_sums_keep_no_graph_of_the_losses() -> None:
    loss = torch.tensor(1.0, requires_grad=True) * 2
    sums = Sums(("loss",), CPU)
    sums.add((loss,), 1)
    reduced: list[Tensor] = []
    sums.mean(lambda tensor: reduced.append(tensor) or tensor)  # type: ignore[func-returns-value]
    assert not reduced[0].requires_grad


def test_one_value_per_name_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        Sums(("loss", "accuracy"), CPU).add((torch.tensor(1.0),), 1)


def test_a_mean_counts_like_the_sum_that_it_is_of() -> None:
    by_sum, by_mean = (Sums(("loss",), torch.device("cpu")) for _ in range(2))
    for count in (3, 100, 1):
        mean = torch.rand((), requires_grad=True)
        by_sum.add((mean.double() * count,), count)
        by_mean.add_mean(mean, count)
    assert by_mean.count == 104
    assert by_mean.local_mean("loss") == by_sum.local_mean("loss")

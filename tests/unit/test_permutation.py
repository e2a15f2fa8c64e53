"""The permutation without a table: each sample has one place, and which one cannot be told from its neighbours'."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.permutation import Permutation

_LOOKED_AT = 200_000
_CELLS = 20


def places(begin: int, end: int) -> npt.NDArray[np.uint64]:
    return np.arange(begin, end, dtype=np.uint64)


@settings(deadline=None, max_examples=100)
@given(samples=st.integers(1, 2000), seed=st.integers(0, 2**63 - 1), data=st.data())
def test_each_sample_has_one_place_wherever_one_begins_to_ask(samples: int, seed: int, data: st.DataObject) -> None:
    order = Permutation(samples, seed)
    cut = data.draw(st.integers(0, samples))
    parts = [*order.at(places(0, cut)).tolist(), *order.at(places(cut, samples)).tolist()]
    assert sorted(parts) == list(range(samples))
    assert parts == Permutation(samples, seed).at(places(0, samples)).tolist()


@pytest.mark.parametrize("samples", [1, 2, 10, 10**12 + 1])
def test_without_a_seed_each_place_is_its_own_sample(samples: int) -> None:
    last = places(max(0, samples - 10), samples)
    assert Permutation(samples, None).at(last).tolist() == last.tolist()


def chi_squared(*values: npt.NDArray[np.uint64]) -> float:
    """The statistic of a table of equally probable cells, less its mean, in standard deviations."""
    cell = np.zeros(len(values[0]), dtype=np.int64)
    for value in values:
        cell = cell * _CELLS + value.astype(np.int64)
    counts = np.bincount(cell, minlength=_CELLS ** len(values))
    freedom = len(counts) - 1
    statistic = ((counts - len(cell) / len(counts)) ** 2).sum() * len(counts) / len(cell)
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("samples", "step"), [(1_050_000, 1), (100_000_000, 1), (100_000_000, 499), (100_000_000, 10_001)]
)
def test_the_order_is_uniform_and_neighbours_tell_nothing_of_each_other(samples: int, step: int, seed: int) -> None:
    # Of 100 million, the base of the two digits is 10,000.
    asked = places(1000, 1000 + _LOOKED_AT) * np.uint64(step) % np.uint64(samples)
    found, in_other_epoch = (Permutation(samples, key).at(asked) for key in (seed, seed + 100))
    for divide, by in ((np.floor_divide, samples // _CELLS), (np.remainder, _CELLS)):
        there, seen, in_other = (divide(numbers, np.uint64(by)) for numbers in (asked, found, in_other_epoch))
        assert abs(chi_squared(seen)) < 5
        assert abs(chi_squared(seen[:-1], seen[1:])) < 5, "a sample and the next one"
        assert abs(chi_squared(seen, in_other)) < 5, "two epochs"
        if step > 1:  # else all of these places are at the beginning
            assert abs(chi_squared(seen, there)) < 5, "a sample and its place"

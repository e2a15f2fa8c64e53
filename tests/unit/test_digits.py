"""The UCI digits, in MNIST's shape."""

from __future__ import annotations

import sys

import pytest
import torch

from examples.datasets.digits import load_digits
from examples.datasets.mnist import normalize
from trainer.errors import DataError


def test_the_digits_have_mnists_shapes_and_types() -> None:
    for part, samples in zip(load_digits(), (1500, 297), strict=True):
        assert part.inputs.shape == (samples, 1, 28, 28)
        assert part.inputs.dtype == torch.uint8
        assert part.targets.shape == (samples,)
        assert part.targets.dtype == torch.int64
        assert part.transform is normalize


@pytest.mark.distributed
def test_they_are_scikit_learns() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    train, test = load_digits()
    labels = torch.bincount(torch.cat([train.targets, test.targets]))
    bunch = datasets.load_digits()
    assert torch.equal(labels, torch.bincount(torch.from_numpy(bunch.target)))
    # Each pixel is brighter by 255 / 16; scaling up by whole steps keeps the mean, but for the rounding.
    mean = torch.cat([train.inputs, test.inputs]).float().mean().item()
    assert mean == pytest.approx(float(bunch.images.mean()) * 255 / 16, rel=0.02)


def test_the_digits_use_mnists_range_of_grey() -> None:
    train, _ = load_digits()
    # Bilinear scaling blurs the brightest of 16 greys a little.
    assert train.inputs.min().item() == 0
    assert train.inputs.max().item() > 240


def test_both_sides_hold_every_digit_and_no_image_twice() -> None:
    train, test = load_digits()
    for part in (train, test):
        # As many of each as a fair split leaves, roughly.
        assert (torch.bincount(part.targets, minlength=10) > len(part) * 0.06).all()
    together = torch.cat([train.inputs, test.inputs]).flatten(1)
    # The set holds no two images that are alike.
    assert len(torch.unique(together, dim=0)) == 1797


def test_every_rank_loads_the_same_digits_whatever_its_seed() -> None:
    torch.manual_seed(1)
    once = load_digits()
    torch.manual_seed(2)
    for one, other in zip(once, load_digits(), strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)


def test_loading_draws_no_random_numbers() -> None:
    before = torch.random.get_rng_state()
    load_digits()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_without_scikit_learn_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match="`pip install scikit-learn`"):
        load_digits()

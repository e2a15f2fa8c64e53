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


def test_without_scikit_learn_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match="`pip install scikit-learn`"):
        load_digits()

"""The UCI handwritten digits that scikit-learn includes, for a first run on a machine without a network.

Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository (1998).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from examples.datasets.mnist import SIZE, normalize
from trainer import DataError, InMemory

_TEST_SAMPLES = 297


def load_digits() -> tuple[InMemory, InMemory]:
    """Return 1,500 training and 297 test images, scaled from 8 × 8 to MNIST's 28 × 28: uint8 (samples, 1, 28, 28).

    Raises:
        DataError: scikit-learn is not installed.
    """
    # Its file is read without importing scikit-learn, which would take longer than everything else here.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError(
            "dataset 'digits' comes with scikit-learn, which is not installed; install it with "
            "`pip install scikit-learn`"
        )
    table = np.loadtxt(Path(spec.origin).with_name("datasets") / "data" / "digits.csv.gz", delimiter=",")
    images = torch.from_numpy(table[:, :-1]).to(torch.float32).view(-1, 1, 8, 8) * (255 / 16)
    images = F.interpolate(images, size=(SIZE, SIZE), mode="bilinear").round().clamp(0, 255).to(torch.uint8)
    labels = torch.from_numpy(table[:, -1]).to(torch.int64)
    # The set is ordered by writer; a fixed shuffle puts every writer into both parts.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:_TEST_SAMPLES], order[_TEST_SAMPLES:]
    return InMemory(images[train], labels[train], normalize), InMemory(images[test], labels[test], normalize)

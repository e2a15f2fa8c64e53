"""Workloads: what all contestants of a benchmark train, each a network with its data and its recipe."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from examples.datasets.digits import load_digits
from examples.datasets.mnist import find_mnist, normalize, read_mnist
from examples.datasets.text import STANDARD_LIBRARY, load_text
from examples.networks import TutorialNetwork
from examples.transformer import SIZES, Transformer, parameter_groups
from trainer.data.loader import InMemory
from trainer.errors import DataError

BATCH_SIZE = 100
"""Images per rank and step."""
LEARNING_RATE = 0.01
"""For one rank."""
MOMENTUM = 0.5
TUTORIAL, TRANSFORMER, RESNET = "tutorial", "transformer", "resnet"
_LENGTH, _TEXT_BYTES, _WARM_UP = 128, 90_000, 20
_TRAIN_WINDOWS, _TEST_WINDOWS = 320, 64
_SIDE, _TRAIN_IMAGES, _TEST_IMAGES = 64, 640, 256


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A network, its data and its recipe.

    Its samples are a whole number of batches on 1, 2, 4 and 8 ranks, so a loop needs no weights for an uneven tail.
    """

    network: Callable[[], nn.Module]
    """Logits (..., classes) of a batch's prepared inputs."""
    optimizer: Callable[[nn.Module], Optimizer]
    data: Callable[[Path], tuple[InMemory, InMemory]]
    """Returns the training and the test set; `DataError` where the folder has none."""
    prepare: Callable[[Tensor], Tensor]
    """A batch's inputs, as the network takes them."""
    score: Callable[[Tensor, Tensor], Tensor]
    """Of logits (n, classes) and targets (n,), summed over them."""
    worst_score: float
    """After two epochs, on one rank and on two."""
    is_loss: bool
    """Whether a lower score is better."""
    batch_size: int
    """Samples per rank and step."""
    eval_batch_size: int
    samples: int
    """Of an epoch."""
    test_samples: int
    learning_rate: Callable[[int, int, int], float]
    """Of an update (from 0), the updates of an epoch and the number of ranks."""

    def make(self, seed: int) -> nn.Module:
        """Return the network with weights from `seed`."""
        torch.manual_seed(seed)
        return self.network()

    def is_good(self, score: float) -> bool:
        """Return whether a score says that the network was trained."""
        return score <= self.worst_score if self.is_loss else score >= self.worst_score


def mnist_folder(data_dir: Path) -> Path:
    """Return the folder that holds MNIST's files; raise `DataError` where there is none."""
    folder = find_mnist(data_dir)
    if folder is None:
        raise DataError(f"MNIST is not in {data_dir}; name the folder that holds MNIST/raw with --data-dir")
    return folder


def scaled_learning_rate(update: int, updates_per_epoch: int, size: int) -> float:
    """Return the tutorial network's rate: scaled with the ranks, warmed up over an epoch (Goyal et al. 2017)."""
    return LEARNING_RATE * (1 + (size - 1) * min(update + 1, updates_per_epoch) / updates_per_epoch)


def _standard_library(_: Path) -> tuple[InMemory, InMemory]:
    train, test = load_text(STANDARD_LIBRARY, _LENGTH, _TEXT_BYTES)
    return _first(train, _TRAIN_WINDOWS), _first(test, _TEST_WINDOWS)


def _first(text: InMemory, windows: int) -> InMemory:
    return InMemory(text.inputs[:windows].long(), text.targets[:windows].long())


def _right(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.argmax(1) == targets).sum()


def _resnet() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=10)  # type: ignore[no-any-return]


def _digits(_: Path) -> tuple[InMemory, InMemory]:
    train, test = load_digits()
    return (
        InMemory(train.inputs[:_TRAIN_IMAGES], train.targets[:_TRAIN_IMAGES]),
        InMemory(test.inputs[:_TEST_IMAGES], test.targets[:_TEST_IMAGES]),
    )


def _color(images: Tensor) -> Tensor:
    """Return a batch (n, 1, 28, 28) as float32 (n, 3, 64, 64)."""
    return F.interpolate(normalize(images), size=(_SIDE, _SIDE)).expand(-1, 3, -1, -1)


WORKLOADS = {
    TUTORIAL: Workload(
        network=TutorialNetwork,
        optimizer=lambda network: SGD(network.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM),
        data=lambda data_dir: read_mnist(mnist_folder(data_dir)),
        prepare=normalize,
        score=_right,
        worst_score=0.90,  # it reaches 0.954 to 0.960
        is_loss=False,
        batch_size=BATCH_SIZE,
        eval_batch_size=1000,
        samples=60_000,
        test_samples=10_000,
        learning_rate=scaled_learning_rate,
    ),
    TRANSFORMER: Workload(
        network=lambda: Transformer(*SIZES["1m"], _LENGTH),
        optimizer=lambda network: AdamW(parameter_groups(network, weight_decay=0.1), lr=1e-3, betas=(0.9, 0.95)),
        data=_standard_library,
        prepare=lambda inputs: inputs,
        score=lambda logits, targets: F.cross_entropy(logits, targets, reduction="sum") / math.log(2),
        worst_score=4.5,  # it reaches 3.84 on two ranks, and 3.55 on one
        is_loss=True,
        batch_size=4,
        eval_batch_size=32,
        samples=_TRAIN_WINDOWS,
        test_samples=_TEST_WINDOWS,
        learning_rate=lambda update, updates_per_epoch, size: 1e-3 * min(1.0, (update + 1) / _WARM_UP),
    ),
    RESNET: Workload(
        network=_resnet,
        optimizer=lambda network: SGD(network.parameters(), lr=0.02, momentum=0.9),
        data=_digits,
        prepare=_color,
        score=_right,
        worst_score=0.5,
        is_loss=False,
        batch_size=16,
        eval_batch_size=64,
        samples=_TRAIN_IMAGES,
        test_samples=_TEST_IMAGES,
        learning_rate=lambda update, updates_per_epoch, size: 0.02,
    ),
}

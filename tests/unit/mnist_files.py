"""Small files of MNIST's formats."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

from examples.datasets import mnist

NAMES = [name for pair in mnist.FILES.values() for name in pair]
TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = NAMES


def idx(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """An array as the content of an IDX file."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def images(samples: int) -> bytes:
    pixels = np.arange(samples * 28 * 28) % 251
    return idx(pixels.astype(np.uint8).reshape(samples, 28, 28))


def labels(samples: int) -> bytes:
    return idx((np.arange(samples) % 10).astype(np.uint8))


def write_mnist(folder: Path, *, gz: bool = False, replace: dict[str, bytes] | None = None) -> Path:
    """Twelve training and four test samples."""
    files = {
        TRAIN_IMAGES: images(12),
        TRAIN_LABELS: labels(12),
        TEST_IMAGES: images(4),
        TEST_LABELS: labels(4),
        **(replace or {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / (name + ".gz" if gz else name)
        path.write_bytes(gzip.compress(content) if gz else content)
    return folder


def below(folder: Path) -> list[str]:
    """Everything in a folder, hidden files included."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))

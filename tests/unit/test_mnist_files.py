"""MNIST's IDX files as they should be, and damaged in every way."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.datasets.mnist import find_mnist, read_mnist
from tests.unit.mnist_files import TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS, idx, images, labels, write_mnist
from trainer.errors import DataError


@pytest.mark.parametrize("gz", [False, True])
def test_the_files_are_read_as_images_and_labels(tmp_path: Path, gz: bool) -> None:
    train, test = read_mnist(write_mnist(tmp_path, gz=gz))
    assert train.inputs.dtype == torch.uint8
    assert train.inputs.shape == (12, 1, 28, 28)
    assert train.targets.dtype == torch.int64
    assert train.targets.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert train.inputs.flatten().tolist() == [place % 251 for place in range(12 * 28 * 28)]
    assert (len(test), test.inputs.shape) == (4, (4, 1, 28, 28))


IMAGES = images(12)
DAMAGED = {
    "empty": (b"", "begins with nothing"),
    "a web page": (b"<html>404 Not Found</html>", "is no IDX file of bytes with 3 dimensions: it begins with 3c68746d"),
    "cut after the head": (IMAGES[:16], "is truncated: its head announces 12 × 28 × 28 bytes, 9424 with the head"),
    "cut in the last image": (IMAGES[:-1], "is truncated.*and it has 9423"),
    "too long": (IMAGES + b"\0", "is too long.*and it has 9425"),
    # 2^31 · 2^31 · 4 is 2^64, which is 0 in 64 bits.
    "sizes that overflow": (struct.pack(">4B3I", 0, 0, 8, 3, 2**31, 2**31, 4), "at most 268,435,456 are read"),
    "images of another size": (idx(np.zeros((12, 20, 20), dtype=np.uint8)), "20 × 20"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path: Path, damage: str) -> None:
    content, message = DAMAGED[damage]
    write_mnist(tmp_path, replace={TRAIN_IMAGES: content})
    with pytest.raises(DataError, match=message) as caught:
        read_mnist(tmp_path)
    assert TRAIN_IMAGES in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / TEST_LABELS).unlink()
    with pytest.raises(DataError, match=f"{TEST_LABELS} cannot be read: No such file"):
        read_mnist(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (TRAIN_LABELS, labels(11), f"{TRAIN_IMAGES} holds 12 images, but .*{TRAIN_LABELS} holds 11 labels"),
        (TEST_LABELS, idx(np.array([0, 9, 10, 3], dtype=np.uint8)), f"{TEST_LABELS} holds the label 10"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    write_mnist(tmp_path, replace={name: content})
    with pytest.raises(DataError, match=message):
        read_mnist(tmp_path)


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("place", [".", "MNIST/raw"])
def test_the_files_are_found_in_the_folder_itself_and_where_torchvision_puts_them(
    tmp_path: Path, place: str, gz: bool
) -> None:
    write_mnist(tmp_path / place, gz=gz)
    assert find_mnist(tmp_path) == tmp_path / place


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    archive = write_mnist(tmp_path, gz=True) / f"{TRAIN_IMAGES}.gz"
    archive.write_bytes(archive.read_bytes()[:-4])
    with pytest.raises(DataError, match=TRAIN_IMAGES + r"\.gz is damaged or truncated"):
        read_mnist(tmp_path)

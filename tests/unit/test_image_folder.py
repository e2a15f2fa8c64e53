"""examples/image_folder.py: the images that it draws, the folders that it reads, and how long the script is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from examples.datasets.images import KINDS, SIZE, draw_images, load_images
from trainer import DataError


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.jpg"))}


def test_every_host_draws_the_same_images_of_every_kind(tmp_path: Path) -> None:
    before = random.getstate()
    for name in ("a", "b"):
        draw_images(tmp_path / name, train=3, test=2)
    assert random.getstate() == before
    drawn = contents(tmp_path / "a")
    assert drawn == contents(tmp_path / "b")
    assert len(set(drawn.values())) == len(drawn) == 5 * len(KINDS)
    train, test = load_images(tmp_path / "a", lambda image: image, lambda image: image.size)
    assert train.classes == test.classes == sorted(KINDS)
    assert (len(train), len(test)) == (3 * len(KINDS), 2 * len(KINDS))
    assert (train[0][0].mode, test[0][0]) == ("RGB", (SIZE, SIZE))


def test_a_folder_without_classes_or_with_others_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"^{tmp_path}/train is no folder of class folders with images: .*cat/1.jpg$"):
        load_images(tmp_path, str, str)
    draw_images(tmp_path / "drawn", train=1, test=1)
    (tmp_path / "drawn/val/dots").rename(tmp_path / "drawn/val/points")
    with pytest.raises(DataError, match=r"have different classes: only one has 'dots'$"):
        load_images(tmp_path / "drawn", str, str)

"""Images of classes, one folder for each: read from any folder, or drawn where there is none."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFilter
from torchvision.datasets import ImageFolder

from trainer import DataError

KINDS = ("circle", "ring", "square", "frame", "triangle", "cross", "stripes", "dots")
"""What is drawn: a class each."""
SIZE = 96
"""Pixels on each side of a drawn image."""

_Color = tuple[int, int, int]
_Box = tuple[float, float, float, float]


def load_images(
    folder: Path, train: Callable[[Any], Any], test: Callable[[Any], Any]
) -> tuple[ImageFolder, ImageFolder]:
    """Return the images below `folder`/train and `folder`/val, whose sub-folders are the classes, as ImageNet has them.

    Args:
        train, test: make what the model takes of a PIL image; they run in the loader's workers.

    Raises:
        DataError: one of the two is not there or has no images, or their classes differ.
    """
    parts = []
    for name, transform in (("train", train), ("val", test)):
        try:
            parts.append(ImageFolder(str(folder / name), transform))
        except FileNotFoundError as error:  # torchvision's text names an empty class, or the missing folder
            raise DataError(
                f"{folder / name} is no folder of class folders with images: {error}; valid is, for instance, "
                f"{folder / name}/cat/1.jpg"
            ) from None
    if parts[0].classes != parts[1].classes:
        differing = sorted(set(parts[0].classes) ^ set(parts[1].classes))
        raise DataError(f"{folder}/train and {folder}/val have different classes: only one has {differing[0]!r}")
    return parts[0], parts[1]


def draw_images(folder: Path, train: int = 40, test: int = 12) -> None:
    """Draw JPEGs of every kind into `folder`/train and `folder`/val, where `folder` is not there yet.

    The folder appears whole or not at all, so an interrupted call leaves none behind. The images are the same on every
    host. Call it on one rank per host.

    Args:
        train, test: images of each kind.

    Raises:
        DataError: the folder cannot be written.
    """
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise DataError(f"{folder.parent} cannot be written: {error.strerror or error}") from None
    try:
        for part, count in (("train", train), ("val", test)):
            for kind in KINDS:
                (work / part / kind).mkdir(parents=True)
                for number in range(count):
                    numbers = random.Random(f"{part} {kind} {number}")  # noqa: S311 (they hide nothing)
                    draw(kind, numbers).save(work / part / kind / f"{number:03}.jpg")
        work.chmod(0o755)
        work.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # else another host that shares the folder was faster
            raise DataError(f"{folder} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def draw(kind: str, numbers: random.Random) -> Image.Image:
    """Return an image of one of `KINDS`: in colors, in a place and of a size that `numbers` draws, slightly blurred."""
    paper = _color(numbers)
    ink = _color(numbers)
    while sum(abs(one - other) for one, other in zip(paper, ink, strict=True)) < 200:  # too alike to be seen
        ink = _color(numbers)
    image = Image.new("RGB", (SIZE, SIZE), paper)
    across = numbers.uniform(0.45, 0.8) * SIZE
    left, top = numbers.uniform(0, SIZE - across), numbers.uniform(0, SIZE - across)
    _PENS[kind](ImageDraw.Draw(image), (left, top, left + across, top + across), ink)
    image = image.rotate(numbers.uniform(-15, 15), Image.Resampling.BILINEAR, fillcolor=paper)
    return image.filter(ImageFilter.GaussianBlur(numbers.uniform(0, 1.2)))


def _color(numbers: random.Random) -> _Color:
    return numbers.randrange(256), numbers.randrange(256), numbers.randrange(256)


def _cross(pen: ImageDraw.ImageDraw, box: _Box, ink: _Color) -> None:
    left, top, right, bottom = box
    arm = (right - left) / 3
    pen.rectangle((left + arm, top, right - arm, bottom), ink)
    pen.rectangle((left, top + arm, right, bottom - arm), ink)


def _triangle(pen: ImageDraw.ImageDraw, box: _Box, ink: _Color) -> None:
    left, top, right, bottom = box
    pen.polygon([(left, bottom), (right, bottom), ((left + right) / 2, top)], ink)


def _stripes(pen: ImageDraw.ImageDraw, box: _Box, ink: _Color) -> None:
    left, top, right, bottom = box
    high = (bottom - top) / 7
    for number in (0, 2, 4, 6):
        pen.rectangle((left, top + number * high, right, top + (number + 1) * high), ink)


def _dots(pen: ImageDraw.ImageDraw, box: _Box, ink: _Color) -> None:
    left, top, right, _ = box
    wide = (right - left) / 5
    for number in range(9):
        x, y = left + number % 3 * 2 * wide, top + number // 3 * 2 * wide
        pen.ellipse((x, y, x + wide, y + wide), ink)


_PENS: dict[str, Callable[[ImageDraw.ImageDraw, _Box, _Color], None]] = {
    "circle": lambda pen, box, ink: pen.ellipse(box, ink),
    "ring": lambda pen, box, ink: pen.ellipse(box, outline=ink, width=SIZE // 14),
    "square": lambda pen, box, ink: pen.rectangle(box, ink),
    "frame": lambda pen, box, ink: pen.rectangle(box, outline=ink, width=SIZE // 14),
    "triangle": _triangle,
    "cross": _cross,
    "stripes": _stripes,
    "dots": _dots,
}

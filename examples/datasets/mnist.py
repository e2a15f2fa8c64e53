"""MNIST: read from its IDX files, or downloaded first.

The format, from the MNIST page of LeCun, Cortes and Burges: a big-endian magic number (two zero bytes, the
element type, the number of dimensions), each dimension as a 32-bit integer, then the elements.
"""

from __future__ import annotations

import gzip
import math
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer import DataError, InMemory

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
SIZE = 28
MEAN, STD = 0.1307, 0.3081
"""Of the training images' pixels, with white as 1."""
DOWNLOAD_TIMEOUT_S = 120.0
_MOST_BYTES = 256 << 20
"""Of an unpacked file; MNIST's largest has 47 MB. A packed one of 1 MB may unpack to 1 GB."""

_UNSIGNED_BYTE = 0x08
# torchvision knows the mirrors and the checksums. It has no timeout, so it runs in a process that can be ended.
_DOWNLOAD = "import sys, torchvision; torchvision.datasets.MNIST(sys.argv[1], download=True)"


def find_mnist(data_dir: Path) -> Path | None:
    """Return the folder with MNIST's four files, plain or .gz: MNIST/raw in `data_dir`, or `data_dir` itself.

    Raises:
        DataError: a folder cannot be read.
    """
    names = [name for pair in FILES.values() for name in pair]
    for folder in (data_dir / "MNIST" / "raw", data_dir):
        if all(_existing(folder / name) for name in names):
            return folder
    return None


def read_mnist(folder: Path) -> tuple[InMemory, InMemory]:
    """Read the training and the test set.

    Returns:
        Two datasets: images as uint8 of shape (samples, 1, 28, 28), normalized to float32 batch by batch;
        labels as int64 of shape (samples,).

    Raises:
        DataError: a file is missing, truncated, not an IDX file, or does not fit its partner.
    """
    train, test = (_read_part(folder, part) for part in ("train", "test"))
    return train, test


def download_mnist(data_dir: Path, timeout_s: float = DOWNLOAD_TIMEOUT_S) -> str | None:
    """Download MNIST into `data_dir`/MNIST/raw through torchvision, which verifies checksums.

    The files appear whole or not at all. Call it on one rank per host.

    Returns:
        What went wrong, in a few words; None on success.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".mnist-", dir=data_dir))
    except OSError as error:
        return f"{data_dir} cannot be written: {error.strerror or error}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DOWNLOAD, str(work)], capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode != 0:
            return _last_line(done.stderr)
        target = data_dir / "MNIST"
        target.mkdir(exist_ok=True)
        if find_mnist(work) is None:
            return "torchvision left no files"
        shutil.rmtree(target / "raw", ignore_errors=True)
        (work / "MNIST" / "raw").rename(target / "raw")
    except subprocess.TimeoutExpired:
        return f"it took longer than {timeout_s:.0f} s"
    except OSError as error:
        return str(error)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return None


def normalize(images: Tensor) -> Tensor:
    """Convert uint8 images to float32 with mean 0 and standard deviation 1 over the training set."""
    return images.to(torch.float32).sub_(MEAN * 255).div_(STD * 255)


def _read_part(folder: Path, part: str) -> InMemory:
    image_file, label_file = (_existing(folder / name) or folder / name for name in FILES[part])
    images, labels = read_idx(image_file, dimensions=3), read_idx(label_file, dimensions=1)
    if len(images) != len(labels):
        raise DataError(
            f"{image_file} holds {len(images)} images, but {label_file} holds {len(labels)} labels; "
            "they must be as many"
        )
    if images.shape[1:] != (SIZE, SIZE):
        raise DataError(
            f"{image_file} holds images of {' × '.join(map(str, images.shape[1:]))} pixels; MNIST's are {SIZE} × {SIZE}"
        )
    if len(labels) and int(labels.max()) > 9:
        raise DataError(f"{label_file} holds the label {int(labels.max())}; valid are 0 to 9")
    return InMemory(images.unsqueeze(1), labels.to(torch.int64), normalize)


def read_idx(path: Path, *, dimensions: int) -> Tensor:
    """Read an IDX file of unsigned bytes, plain or gzipped, into a uint8 tensor of its shape.

    Raises:
        DataError: the file cannot be read, or is not an IDX file of so many dimensions.
    """
    content = _read(path)
    magic = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    if content[:4] != magic:
        raise DataError(
            f"{path} is no IDX file of bytes with {dimensions} dimension{'s' * (dimensions > 1)}: "
            f"it begins with {content[:4].hex() or 'nothing'}, not {magic.hex()}"
        )
    head = 4 + 4 * dimensions
    if len(content) < head:
        raise DataError(f"{path} is truncated: its head takes {head} bytes, and it has {len(content)}")
    shape = tuple(int(size) for size in np.frombuffer(content[4:head], dtype=">u4"))
    if max(shape) > _MOST_BYTES:  # NumPy refuses such a shape, also of no bytes because another size is 0
        raise DataError(f"{path} announces {' × '.join(map(str, shape))} bytes; at most {_MOST_BYTES:,} are read")
    expected = head + math.prod(shape)
    if len(content) != expected:
        raise DataError(
            f"{path} is {'truncated' if len(content) < expected else 'too long'}: its head announces "
            f"{' × '.join(map(str, shape))} bytes, {expected} with the head, and it has {len(content)}"
        )
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=head).reshape(shape).copy())


def _read(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged or truncated: {error}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(content) > _MOST_BYTES:
        raise DataError(f"{path} has more than {_MOST_BYTES:,} bytes")
    return content


def _existing(path: Path) -> Path | None:
    for candidate in (path, path.with_name(path.name + ".gz")):
        try:
            if candidate.is_file():
                return candidate
        except OSError as error:  # a folder that this user may not enter, say
            raise DataError(f"{path.parent} cannot be read: {error.strerror or error}") from None
    return None


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "torchvision gave no reason"

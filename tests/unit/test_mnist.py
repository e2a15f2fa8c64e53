"""MNIST: the IDX files as they should be and damaged in every way, the download, and what replaces it."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from examples import datasets
from examples.datasets import load_dataset, mnist
from examples.datasets.mnist import download_mnist, find_mnist, normalize, read_idx, read_mnist
from trainer.data.loader import InMemory
from trainer.errors import DataError
from trainer.launch.world import World

NAMES = [name for pair in mnist.FILES.values() for name in pair]
TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = NAMES

# Replaces the command that downloads; it is given the folder to work in.
DOWNLOAD_HALF = """
import pathlib, sys
raw = pathlib.Path(sys.argv[1], "MNIST", "raw")
raw.mkdir(parents=True)
(raw / "train-images-idx3-ubyte.gz").write_bytes(b"half of it")
"""
DOWNLOAD_FAILS = DOWNLOAD_HALF + "print('Traceback: many lines', file=sys.stderr); sys.exit('no route to host')"
DOWNLOAD_STALLS = DOWNLOAD_HALF + "import time; time.sleep(60)"
DOWNLOAD_SAYS_NOTHING = "raise SystemExit(3)"


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


@pytest.mark.parametrize("gz", [False, True])
def test_the_files_are_read_as_images_and_labels(tmp_path: Path, gz: bool) -> None:
    train, test = read_mnist(write_mnist(tmp_path, gz=gz))
    assert train.inputs.dtype == torch.uint8
    assert train.inputs.shape == (12, 1, 28, 28)
    assert train.targets.dtype == torch.int64
    assert train.targets.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert train.inputs.flatten().tolist() == [place % 251 for place in range(12 * 28 * 28)]
    assert (len(test), test.inputs.shape) == (4, (4, 1, 28, 28))


def test_batches_are_normalised_to_mean_0_and_deviation_1() -> None:
    black_and_white = normalize(torch.tensor([0, 255], dtype=torch.uint8))
    assert black_and_white.dtype == torch.float32
    assert black_and_white.tolist() == pytest.approx([-0.1307 / 0.3081, (1 - 0.1307) / 0.3081], rel=1e-5)


def test_reading_leaves_the_images_unnormalised_until_a_batch_is_cut(tmp_path: Path) -> None:
    train, _ = read_mnist(write_mnist(tmp_path))
    assert train.transform is normalize


def test_plain_and_compressed_files_may_be_mixed_and_the_plain_one_is_read(tmp_path: Path) -> None:
    write_mnist(tmp_path, gz=True)
    (tmp_path / TRAIN_LABELS).write_bytes(idx(np.full(12, 7, dtype=np.uint8)))
    (tmp_path / (TEST_LABELS + ".gz")).rename(tmp_path / "moved")
    (tmp_path / TEST_LABELS).write_bytes(labels(4))
    train, test = read_mnist(tmp_path)
    assert train.targets.tolist() == [7] * 12
    assert len(test) == 4


IMAGES = images(12)
DAMAGED = {
    "empty": (b"", "begins with nothing"),
    "a web page": (b"<html>404 Not Found</html>", "is no IDX file of bytes with 3 dimensions: it begins with 3c68746d"),
    "labels": (labels(12), "begins with 00000801, not 00000803"),
    "floats": (b"\0\0\x0d\3" + IMAGES[4:], "begins with 00000d03"),
    "cut in the magic number": (IMAGES[:3], "begins with 000008"),
    "cut after the magic number": (IMAGES[:4], "is truncated"),
    "cut in a dimension": (IMAGES[:9], "is truncated"),
    "cut after a dimension": (IMAGES[:12], "is truncated"),
    "cut after the head": (IMAGES[:16], "is truncated: its head announces 12 × 28 × 28 bytes, 9424 with the head"),
    "cut in the last image": (IMAGES[:-1], "is truncated.*and it has 9423"),
    "too long": (IMAGES + b"\0", "is too long.*and it has 9425"),
    # 2^31 · 2^31 · 4 is 2^64, which is 0 in 64 bits.
    "sizes that overflow": (struct.pack(">4B3I", 0, 0, 8, 3, 2**31, 2**31, 4), "is truncated"),
    "images of another size": (idx(np.zeros((12, 20, 20), dtype=np.uint8)), "20 × 20"),
}


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path: Path, damage: str, gz: bool) -> None:
    content, message = DAMAGED[damage]
    write_mnist(tmp_path, gz=gz, replace={TRAIN_IMAGES: content})
    with pytest.raises(DataError, match=message) as caught:
        read_mnist(tmp_path)
    assert TRAIN_IMAGES in str(caught.value)
    assert "\n" not in str(caught.value)


def flip(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 0xFF
    return bytes(changed)


PACKED = gzip.compress(IMAGES)


@pytest.mark.parametrize(
    "content",
    [
        PACKED[:5],
        PACKED[: len(PACKED) // 2],
        PACKED[:-4],
        flip(PACKED, 0),
        flip(PACKED, 10),
        flip(PACKED, len(PACKED) // 2),
        flip(PACKED, len(PACKED) - 6),
        IMAGES,
        zlib.compress(IMAGES),
        PACKED + b"more",
    ],
    ids=[
        "cut in its head",
        "cut in the middle",
        "cut in its checksum",
        "another magic number",
        "damaged at the start",
        "damaged in the middle",
        "wrong checksum",
        "not compressed",
        "compressed otherwise",
        "something after it",
    ],
)
def test_a_damaged_archive_is_named(tmp_path: Path, content: bytes) -> None:
    write_mnist(tmp_path, gz=True)
    (tmp_path / (TRAIN_IMAGES + ".gz")).write_bytes(content)
    with pytest.raises(DataError, match=TRAIN_IMAGES + r"\.gz is damaged or truncated"):
        read_mnist(tmp_path)


def test_an_empty_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "empty.gz"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"empty\.gz"):
        read_idx(path, dimensions=1)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_mnist(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=f"{name} cannot be read: No such file"):
        read_mnist(tmp_path)


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_idx(tmp_path, dimensions=1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (TRAIN_LABELS, labels(11), f"{TRAIN_IMAGES} holds 12 images, but .*{TRAIN_LABELS} holds 11 labels"),
        (TEST_LABELS, labels(12), f"{TEST_IMAGES} holds 4 images, but .*{TEST_LABELS} holds 12 labels"),
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


def test_a_folder_that_lacks_a_file_or_is_not_there_is_not_found(tmp_path: Path) -> None:
    assert find_mnist(tmp_path / "nowhere") is None
    write_mnist(tmp_path / "MNIST" / "raw")
    (tmp_path / "MNIST" / "raw" / TEST_LABELS).unlink()
    assert find_mnist(tmp_path) is None


def downloading(files: Path) -> str:
    """A command that finds the files of `files` on its mirror."""
    return (
        "import pathlib, shutil, sys; "
        f"shutil.copytree({str(files)!r}, pathlib.Path(sys.argv[1], 'MNIST', 'raw'), dirs_exist_ok=True)"
    )


def test_a_download_leaves_the_four_files_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "_DOWNLOAD", downloading(write_mnist(tmp_path / "mirror")))
    data_dir = tmp_path / "a" / "new" / "folder"
    assert download_mnist(data_dir) is None
    assert below(data_dir) == sorted(["MNIST", "MNIST/raw", *(f"MNIST/raw/{name}" for name in NAMES)])
    assert [len(part) for part in read_mnist(data_dir / "MNIST" / "raw")] == [12, 4]


def test_a_download_replaces_what_an_earlier_one_left_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mnist, "_DOWNLOAD", downloading(write_mnist(tmp_path / "mirror")))
    data_dir = tmp_path / "data"
    write_mnist(data_dir / "MNIST" / "raw", gz=True, replace={TRAIN_IMAGES: b"cut"})
    (data_dir / "MNIST" / "raw" / f"{TEST_LABELS}.gz").unlink()
    assert download_mnist(data_dir) is None
    assert [len(part) for part in read_mnist(data_dir / "MNIST" / "raw")] == [12, 4]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (DOWNLOAD_FAILS, "no route to host"),
        (DOWNLOAD_STALLS, "it took longer than 1 s"),
        (DOWNLOAD_SAYS_NOTHING, "torchvision gave no reason"),
        ("pass", "left no files"),
    ],
    ids=["fails", "stalls", "says nothing", "leaves nothing"],
)
def test_a_download_that_fails_says_why_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, problem: str
) -> None:
    monkeypatch.setattr(mnist, "_DOWNLOAD", command)
    found = download_mnist(tmp_path, timeout_s=0.6)
    assert found is not None
    assert problem in found
    assert "\n" not in found
    assert [name for name in below(tmp_path) if name != "MNIST"] == []


def test_a_failed_download_leaves_the_users_own_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "_DOWNLOAD", DOWNLOAD_FAILS)
    raw = write_mnist(tmp_path / "MNIST" / "raw")
    (raw / TEST_LABELS).unlink()
    before = below(tmp_path)
    assert download_mnist(tmp_path) == "no route to host"
    assert below(tmp_path) == before


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    # Below a regular file, where not even root can make one.
    (tmp_path / "file").write_text("")
    problem = download_mnist(tmp_path / "file" / "data")
    assert problem is not None
    assert f"{tmp_path / 'file' / 'data'} cannot be written" in problem


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test goes out to the network."""
    monkeypatch.setattr(mnist, "_DOWNLOAD", DOWNLOAD_FAILS)


def assert_are_digits(datasets: tuple[InMemory, InMemory]) -> None:
    assert [len(part) for part in datasets] == [1500, 297]


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["auto", "mnist"])
def test_mnist_that_is_there_is_read_and_nothing_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")
    train, test = load_dataset(name, tmp_path, World())
    assert (len(train), len(test)) == (12, 4)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["auto", "mnist"])
def test_mnist_is_downloaded_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(mnist, "_DOWNLOAD", downloading(write_mnist(tmp_path / "mirror")))
    train, test = load_dataset(name, tmp_path / "data", World())
    assert (len(train), len(test)) == (12, 4)
    assert capsys.readouterr().err == f"trainer: no MNIST in {tmp_path / 'data'}; downloading it\n"


@pytest.mark.usefixtures("offline")
def test_auto_falls_back_to_the_digits_with_a_loud_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_are_digits(load_dataset("auto", tmp_path, World()))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"WARNING: MNIST is not in {tmp_path} and cannot be downloaded (no route to host)" in printed.err
    assert "THE ACCURACY BELOW IS NOT MNIST'S" in printed.err
    assert "=" * 80 in printed.err


@pytest.mark.usefixtures("offline")
def test_mnist_by_name_never_falls_back(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_dataset("mnist", tmp_path, World())
    assert f"MNIST is not in {tmp_path} and cannot be downloaded (no route to host)" in str(caught.value)
    assert "--data-dir" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["auto", "mnist"])
def test_a_damaged_file_is_an_error_and_never_a_reason_to_fall_back(tmp_path: Path, name: str) -> None:
    write_mnist(tmp_path, replace={TRAIN_IMAGES: IMAGES[:-1]})
    with pytest.raises(DataError, match="is truncated"):
        load_dataset(name, tmp_path, World())


def test_an_unknown_dataset_is_refused_with_the_valid_names(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="dataset is 'cifar'; valid are auto, mnist, digits"):
        load_dataset("cifar", tmp_path, World())


def test_the_digits_need_neither_files_nor_the_other_ranks(tmp_path: Path) -> None:
    def gather(problem: str | None) -> list[str | None]:
        raise AssertionError("the other ranks need not be asked")

    assert_are_digits(load_dataset("digits", tmp_path / "nowhere", World(), gather))
    assert below(tmp_path) == []


def rank(number: int, *, local: int) -> World:
    return World(rank=number, size=4, local_rank=local, local_size=2)


def test_one_rank_per_host_downloads_and_only_rank_0_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Path] = []

    def download(data_dir: Path) -> str:
        asked.append(data_dir)
        return "no route to host"

    monkeypatch.setattr(datasets, "download_mnist", download)
    for number, local, expected in ((0, 0, 1), (1, 1, 0), (2, 0, 1), (3, 1, 0)):
        asked.clear()
        # What kept a rank from downloading reaches the others through gather.
        assert_are_digits(
            load_dataset("auto", tmp_path, rank(number, local=local), lambda problem: [problem, "no route to host"])
        )
        assert len(asked) == expected
        assert bool(capsys.readouterr().err) == (number == 0)


@pytest.mark.usefixtures("offline")
def test_all_ranks_fall_back_when_one_host_has_no_mnist(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    assert_are_digits(load_dataset("auto", tmp_path, rank(1, local=1), lambda problem: [problem, None, "no route"]))
    with pytest.raises(DataError, match=r"\(no route\)"):
        load_dataset("mnist", tmp_path, rank(1, local=1), lambda problem: [problem, None, "no route"])


def test_every_rank_waits_for_the_download_before_it_looks(tmp_path: Path) -> None:
    def gather(problem: str | None) -> list[str | None]:
        write_mnist(tmp_path)  # what the host's first rank has done by the time all have gathered
        return [None, problem]

    train, _ = load_dataset("mnist", tmp_path, rank(1, local=1), gather)
    assert isinstance(train.inputs, Tensor)
    assert len(train) == 12


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(DataError, match=rf"^{tmp_path}/MNIST/raw cannot be read: Permission denied$"):
        find_mnist(tmp_path)

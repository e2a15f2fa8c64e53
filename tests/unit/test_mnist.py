"""MNIST: the download, what replaces it, and which rank does it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from examples import datasets
from examples.datasets import load_dataset, mnist
from examples.datasets.mnist import download_mnist, find_mnist, read_mnist
from tests.unit.mnist_files import NAMES, TEST_LABELS, TRAIN_IMAGES, below, images, write_mnist
from trainer.cluster.world import World
from trainer.data.loader import InMemory
from trainer.errors import DataError

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
    write_mnist(tmp_path, replace={TRAIN_IMAGES: images(12)[:-1]})
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

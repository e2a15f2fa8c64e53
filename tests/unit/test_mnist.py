"""MNIST: the download, what replaces it, and which rank does it."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import datasets
from examples.datasets import load_dataset, mnist
from examples.datasets.mnist import download_mnist, read_mnist
from tests.unit.mnist_files import NAMES, below, write_mnist
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


@pytest.mark.parametrize(
    ("command", "problem"),
    [(DOWNLOAD_FAILS, "no route to host"), (DOWNLOAD_STALLS, "it took longer than 1 s"), ("pass", "left no files")],
    ids=["fails", "stalls", "leaves nothing"],
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


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test goes out to the network."""
    monkeypatch.setattr(mnist, "_DOWNLOAD", DOWNLOAD_FAILS)


def assert_are_digits(datasets: tuple[InMemory, InMemory]) -> None:
    assert [len(part) for part in datasets] == [1500, 297]


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

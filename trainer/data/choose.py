"""Which digits to train on: MNIST where it is or can be had, and a loud word where it cannot."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from trainer.data.digits import load_digits
from trainer.data.loader import InMemory
from trainer.data.mnist import download_mnist, find_mnist, read_mnist
from trainer.errors import DataError
from trainer.world import World

DATASETS = ("auto", "mnist", "digits")


def load_dataset(
    name: str,
    data_dir: Path,
    world: World,
    gather: Callable[[str | None], list[str | None]] = lambda problem: [problem],
) -> tuple[InMemory, InMemory]:
    """The training and the test set, the same on every rank.

    One rank per host downloads what is not there; then the ranks compare notes, so that either all of them
    train on MNIST or all on something else.

    Args:
        name: one of `DATASETS`: "auto" falls back to the UCI digits where MNIST cannot be had, "mnist" never does.
        data_dir: where MNIST lies, or shall lie.
        gather: every rank's word, on every rank, as `Strategy.all_gather_object`. It is a barrier, too.

    Raises:
        DataError: there is no such dataset, MNIST cannot be had, or a file of it is damaged.
    """
    if name not in DATASETS:
        raise DataError(f"dataset is {name!r}; valid are {', '.join(DATASETS)}")
    if name == "digits":
        return load_digits()
    problem = None
    if world.local_rank == 0 and find_mnist(data_dir) is None:
        if world.is_root:
            print(f"trainer: no MNIST in {data_dir}; downloading it", file=sys.stderr, flush=True)
        problem = download_mnist(data_dir)
        if find_mnist(data_dir) is not None:
            problem = None  # Another host that shares the folder was faster.
    problem = next((word for word in gather(problem) if word is not None), None)
    folder = find_mnist(data_dir)
    if problem is None and folder is not None:
        return read_mnist(folder)
    reason = f"MNIST is not in {data_dir} and cannot be downloaded ({problem or 'not on this host'})"
    if name == "mnist":
        raise DataError(f"{reason}; put its four files into {data_dir}/MNIST/raw, or name their folder with --data-dir")
    if world.is_root:
        _warn(reason)
    return load_digits()


def _warn(reason: str) -> None:
    line = "=" * 100
    print(
        f"{line}\nWARNING: {reason}.\nTraining on scikit-learn's 1,797 UCI digits instead: "
        f"THE ACCURACY BELOW IS NOT MNIST'S.\n{line}",
        file=sys.stderr,
        flush=True,
    )

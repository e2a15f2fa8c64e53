"""Datasets of the examples: MNIST where it is present or can be downloaded, else the UCI digits, with a warning."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from examples.datasets.digits import load_digits
from examples.datasets.mnist import download_mnist, find_mnist, read_mnist
from trainer import DataError, InMemory, World
from trainer.cluster.output import print_line

DATASETS = ("auto", "mnist", "digits")


def load_dataset(
    name: str,
    data_dir: Path,
    world: World,
    all_gather: Callable[[str | None], list[str | None]] = lambda problem: [problem],
) -> tuple[InMemory, InMemory]:
    """Return the training and the test set, the same on every rank. Collective.

    One rank per host downloads what is missing. The ranks then exchange what went wrong, so that all of them train on
    MNIST, or none of them.

    Args:
        name: one of `DATASETS`: "auto" falls back to the UCI digits without MNIST, "mnist" never does.
        data_dir: folder of MNIST, which is downloaded into it.
        all_gather: returns every rank's value, as `Strategy.all_gather_object` does; it is a barrier as well.

    Raises:
        DataError: there is no such dataset, MNIST is not available, or a file of it is damaged.
    """
    if name not in DATASETS:
        raise DataError(f"dataset is {name!r}; valid are {', '.join(DATASETS)}")
    if name == "digits":
        return load_digits()
    problem = None
    if world.local_rank == 0 and find_mnist(data_dir) is None:
        if world.is_root:
            print_line(f"trainer: no MNIST in {data_dir}; downloading it", sys.stderr)
        problem = download_mnist(data_dir)
        if find_mnist(data_dir) is not None:
            problem = None  # Another host that shares the folder was faster.
    problem = next((reason for reason in all_gather(problem) if reason is not None), None)
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
    print_line(
        f"{line}\nWARNING: {reason}.\nTraining on scikit-learn's 1,797 UCI digits instead: "
        f"THE ACCURACY BELOW IS NOT MNIST'S.\n{line}",
        sys.stderr,
    )

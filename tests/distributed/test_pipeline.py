"""The example of model parallelism: with stages, and with replicas of them, it is the training of one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples import pipeline
from tests.distributed.harness import run_job
from trainer import ConfigError

# A learning rate at which a difference in the last bit stays one.
SCRIPT = ["examples/pipeline.py", "--dataset", "digits", "--epochs", "1", "--lr", "0.001", "--device", "cpu"]


def trained(folder: Path, launcher: str, ranks: int, *arguments: str) -> tuple[dict[str, Tensor], str]:
    """The weights that a job ends with, and its output."""
    file = folder / "weights.pt"
    outcome = run_job(launcher, ranks, [*SCRIPT, *arguments, "--save", str(file)])
    assert outcome.code == 0, outcome.output
    return torch.load(file, weights_only=True), outcome.output


@pytest.fixture(scope="module")
def by_one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Tensor]]:
    """The weights of one process with the batch of so many replicas."""

    @cache
    def train(replicas: int) -> dict[str, Tensor]:
        return trained(tmp_path_factory.mktemp("whole"), "python", 1, "--batch-size", str(100 * replicas))[0]

    return train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "ranks", "stages", "replicas"),
    [("torchrun", 2, 2, 1), ("mpirun", 4, 2, 2), ("torchrun", 4, 4, 1), ("horovodrun-mpi", 2, 2, 1)],
)
def test_its_weights_are_those_of_one_process(
    tmp_path: Path,
    by_one_process: Callable[[int], dict[str, Tensor]],
    launcher: str,
    ranks: int,
    stages: int,
    replicas: int,
) -> None:
    found, output = trained(tmp_path, launcher, ranks, "--stages", str(stages))
    assert f"{stages} stages × {replicas} replicas" in output
    expected = by_one_process(replicas)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert float((found[name] - weight).norm() / weight.norm()) < 1e-6, name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stages", "3"], "--stages is 3; with 1 ranks, valid are 1"),
        (["--microbatches", "7"], "--batch-size is 100; it must be a multiple of --microbatches, 7"),
    ],
)
def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str) -> None:
    monkeypatch.setattr(sys, "argv", [*SCRIPT, *arguments])
    with pytest.raises(ConfigError) as caught:
        pipeline.main()
    assert str(caught.value) == words

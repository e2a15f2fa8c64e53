"""The example of model parallelism: with stages, and with replicas of them, it is the training of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.harness import run_job

pytestmark = pytest.mark.distributed
# A learning rate at which a difference in the last bit stays one.
SCRIPT = ["examples/pipeline.py", "--dataset", "digits", "--epochs", "2", "--lr", "0.001", "--device", "cpu"]


@pytest.mark.parametrize(
    ("launcher", "ranks", "stages", "replicas"),
    [("horovodrun-mpi", 2, 2, 1), ("torchrun", 4, 4, 1), ("mpirun", 4, 2, 2)],
)
def test_its_weights_are_those_of_one_process(
    tmp_path: Path, launcher: str, ranks: int, stages: int, replicas: int
) -> None:
    cut = run_job(launcher, ranks, [*SCRIPT, "--stages", str(stages), "--save", str(tmp_path / "cut.pt")])
    assert cut.code == 0, cut.output
    assert f"{stages} stages × {replicas} replicas" in cut.output
    batch = ["--batch-size", str(100 * replicas), "--save", str(tmp_path / "whole.pt")]
    whole = run_job("python", 1, [*SCRIPT, *batch])
    assert whole.code == 0, whole.output
    found, expected = (torch.load(tmp_path / name, weights_only=True) for name in ("cut.pt", "whole.pt"))
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
def test_mistakes_are_one_line(arguments: list[str], words: str) -> None:
    outcome = run_job("python", 1, [*SCRIPT, *arguments])
    assert outcome.code == 1
    assert outcome.output.strip() == f"trainer: {words}"

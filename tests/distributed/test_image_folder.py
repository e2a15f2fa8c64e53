"""examples/image_folder.py learns on one rank and on two, also where it is killed, and evaluates every image once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.datasets.images import KINDS, draw_images
from tests.distributed.harness import Outcome, run_job
from trainer.checkpoint.disk.committed import find

EPOCHS, TRAIN, TEST = 4, 12, 3
EPOCH = re.compile(r"epoch (\d)/4: loss (\d\.\d+), top-1 +(\d+\.\d+)%, top-5 +(\d+\.\d+)% of (\d+) images")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So few images that neither the batch nor the ranks divide them."""
    drawn = tmp_path_factory.mktemp("images") / "drawn"
    draw_images(drawn, TRAIN, TEST)
    return drawn


def job(launcher: str, ranks: int, folder: Path, *options: str) -> Outcome:
    small = ["--size", "40", "--batch-size", "10", "--epochs", str(EPOCHS), "--warm-up", "5", "--workers", "1"]
    script = ["examples/image_folder.py", "--data-dir", str(folder), *small, *options]
    return run_job(launcher, ranks, script, env={"OMP_NUM_THREADS": "1"}, timeout_s=240)


def losses_in(output: str) -> dict[int, float]:
    """Return each epoch's loss, where each has evaluated every image once."""
    lines = EPOCH.findall(output)
    for _, _, first, five, count in lines:
        assert int(count) == TEST * len(KINDS)
        assert 0 <= float(first) <= float(five) <= 100
        hits = float(five) / 100 * int(count)
        assert hits == pytest.approx(round(hits), abs=0.01)
    return {int(epoch): float(loss) for epoch, loss, *_ in lines}


@pytest.mark.slow  # language_model.py is the port that `make test` has
@pytest.mark.parametrize(("launcher", "ranks"), [("horovodrun-mpi", 2), ("python", 1)])
def test_it_learns_on_any_number_of_ranks(folder: Path, tmp_path: Path, launcher: str, ranks: int) -> None:
    outcome = job(launcher, ranks, folder, "--precision", "bf16", "--checkpoints", str(tmp_path))
    assert outcome.code == 0, outcome.output
    losses = losses_in(outcome.output)
    assert list(losses) == [1, 2, 3, 4]
    assert losses[4] < losses[1] - 0.1
    best = re.search(r"the best checkpoint is (\S+)", outcome.output)
    assert best is not None, outcome.output
    assert Path(best[1]) in find(tmp_path)

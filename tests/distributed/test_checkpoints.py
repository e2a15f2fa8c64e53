"""Checkpoints over real interruptions: other numbers of ranks, other launchers, signals where no update comes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.checks_checkpoints import Training
from tests.distributed.harness import Outcome, run_job
from trainer.checkpoint.disk.committed import find, load
from trainer.cluster.world import World
from trainer.strategies.single import SingleStrategy


def job(launcher: str, ranks: int, folder: Path, how: str, after: int = -1, strategy: str = "auto") -> Outcome:
    # Ranks with a thread each; what is trained is small.
    script = ["-m", "tests.distributed.job_that_goes_on", str(folder), how, str(after), strategy]
    return run_job(launcher, ranks, script, env={"OMP_NUM_THREADS": "1"})


def test_any_number_of_ranks_goes_on_in_the_middle_of_an_epoch_sharded_or_not(tmp_path: Path) -> None:
    """A signal saves, and killed ranks leave hidden folders with some parts, which nobody takes for a checkpoint."""
    for launcher, ranks, how, after, strategy in [
        ("horovodrun-mpi", 2, "signal", 1, "auto"),
        ("torchrun", 3, "kill", 5, "fsdp"),
        ("horovodrun-gloo", 2, "signal", 6, "fsdp"),
        ("mpirun", 1, "no", -1, "auto"),
    ]:
        outcome = job(launcher, ranks, tmp_path, how, after, strategy)
        assert not outcome.timed_out
        assert (outcome.code == 0) == (how == "no"), outcome.output
        if how == "signal":
            check_it_has_saved(outcome, tmp_path, after)
        if how != "kill":  # which may have come before the first checkpoint
            parts = [name for name in load(find(tmp_path)[0]).files if name.startswith("part-")]
            assert len(parts) == (ranks if strategy == "fsdp" else 0)
    assert "world size 1, 9 updates, attempt 4" in outcome.output
    uninterrupted = Training(SingleStrategy(World()), depends_on_ranks=False).train()
    for weight, other in zip(torch.load(tmp_path / "weights.pt"), uninterrupted, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-12, atol=1e-14)


def check_it_has_saved(outcome: Outcome, folder: Path, after: int) -> None:
    """Check that a signal after so many updates has saved, and ended the job with the code that asks for a start."""
    assert outcome.code == 75, outcome.output
    assert "SIGTERM: saved" in outcome.output or "a signal on another rank: saved" in outcome.output
    assert load(find(folder)[0]).facts["updates"] >= after


@pytest.mark.parametrize(
    ("launcher", "ranks", "strategy"),
    [
        pytest.param("python", 1, "auto", marks=pytest.mark.slow),
        ("horovodrun-mpi", 2, "auto"),
        pytest.param("horovodrun-mpi", 2, "fsdp", marks=pytest.mark.slow),  # of which each rank saves a part
    ],
)
def test_a_signal_in_an_evaluation_saves_after_it(launcher: str, ranks: int, strategy: str, tmp_path: Path) -> None:
    outcome = job(launcher, ranks, tmp_path, "signal-in-evaluation", strategy=strategy)
    assert outcome.code == 75, outcome.output
    assert "Exception" not in outcome.output
    (newest,) = find(tmp_path)
    facts = load(newest).facts
    assert (facts["epoch"], facts["updates"], facts["taken"]) == (1, 3, [0])


SIGNALLED = """
import os, subprocess, sys, time, trainer, torch
run = trainer.init()
model, optimizer = run.prepare(*[m := torch.nn.Linear(1, 1), torch.optim.SGD(m.parameters(), lr=0.1)])
loader = run.loader([torch.ones(1)] * 200, 1, num_workers=2, multiprocessing_context=sys.argv[2])
checkpoints = run.checkpoints(sys.argv[1])
for epoch in run.epochs(1):
    for number, batch in enumerate(loader):
        if number == 4 and run.rank == 0:
            # From another process, as torchrun does: a worker takes it from its own rank as the end of its work.
            subprocess.run([sys.executable, "-c", f"import os; os.killpg({os.getpgrp()}, 15)"])
        run.backward(model(batch).sum())
        optimizer.step()
        time.sleep(0.05)
"""


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_signal_to_the_whole_group_of_a_rank_saves_with_workers_too(context: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SIGNALLED)
    own_group = "import os, runpy, sys; os.setsid(); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
    outcome = run_job("python", 1, ["-c", own_group, str(script), str(tmp_path / "saved"), context])
    assert outcome.code == 75, outcome.output
    assert "Exception" not in outcome.output
    (newest,) = find(tmp_path / "saved")
    assert load(newest).facts["updates"] < 200

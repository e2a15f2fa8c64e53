"""docs/coming-from-*.md: they show the scripts of examples/coming_from, which have the same losses before and after."""

from __future__ import annotations

import re
from functools import cache

import pytest

from benchmarks import launching
from tests.distributed.harness import ROOT, run_job

SCRIPTS = ROOT / "examples/coming_from"
# The launcher of each page's script before; "peers" is torchrun in .venv-peers.
BEFORE = {"horovod": "horovodrun-mpi", "ddp": "torchrun", "fabric": "peers", "accelerate": "peers"}
AFTER = {
    "horovod": "horovod_after",
    "ddp": "after",
    "fabric": "after",
    "accelerate": "after",
    "lightning-horovod": "lightning_horovod_after",
}
MARKS = {"horovod": [], "ddp": [pytest.mark.slow]}


@cache
def losses(launcher: str, script: str, *options: str, ranks: int = 2) -> list[float]:
    """Return the mean loss over all ranks of both epochs, as rank 0 prints them; one job for all that ask."""
    path = f"examples/coming_from/{script}.py"
    if launcher == "peers":
        command = [*launching.launch(path, ranks, launcher), *options]
        finished = launching.run(command, timeout_s=120, threads=1)
        code, output = finished.code, finished.stdout + finished.stderr
    else:
        outcome = run_job(launcher, ranks, [path, *options], env={"OMP_NUM_THREADS": "1"})
        code, output = outcome.code, outcome.output
    assert code == 0, output
    printed = re.findall(r"epoch (\d): loss (\d+\.\d{8})", output)
    assert [epoch for epoch, _ in printed] == ["0", "1"], output
    return [float(loss) for _, loss in printed]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=MARKS.get(page, [pytest.mark.needs("peers"), pytest.mark.slow])) for page in BEFORE],
)
def test_the_losses_are_equal_before_and_after(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    after = losses("horovodrun-mpi" if page == "horovod" else "torchrun", AFTER[page], "--no-shuffle")
    assert after == pytest.approx(losses(BEFORE[page], f"{page}_before", "--no-shuffle"), rel=1e-6)
    assert after[1] < after[0]


@pytest.mark.slow
def test_trainer_has_the_losses_of_the_loop() -> None:
    # Lightning's own strategy is gone, so what came after it is compared with the loop that equals Horovod's.
    after = losses("python", "lightning_horovod_after", ranks=1)
    assert after == pytest.approx(losses("python", "horovod_after", ranks=1), rel=1e-6)


@pytest.mark.slow
def test_horovods_own_calls_stand_beside_ours() -> None:
    first, second = losses("horovodrun-mpi", "horovod_beside")
    assert second < first

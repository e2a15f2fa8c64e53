"""examples/language_model.py: plain PyTorch's script and its port have the same losses, on any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

import pytest

from tests.distributed.harness import run_job

_TEXT = ["--bytes", "7000", "--length", "32"]
OPTIONS = [*_TEXT, "--epochs", "2", "--batch-size", "10", "--accumulate", "4", "--warm-up", "4", "--no-shuffle"]
EPOCH = re.compile(r"epoch (\d)/2: test loss (\d+\.\d+), (\d+\.\d+) bits per byte")


def losses(launcher: str, ranks: int, script: str, *options: str, env: Mapping[str, str] | None = None) -> list[float]:
    """Return the test losses of a run, one an epoch."""
    env = {**(env or {}), "OMP_NUM_THREADS": "1"}  # a second thread costs more than it gains on a busy machine
    outcome = run_job(launcher, ranks, [f"examples/{script}.py", *OPTIONS, *options], env=env)
    assert outcome.code == 0, outcome.output
    found = EPOCH.findall(outcome.output)
    assert [epoch for epoch, _, _ in found] == ["1", "2"], outcome.output
    return [float(loss) for _, loss, _ in found]


@cache
def plain_losses() -> list[float]:
    """Return those of plain PyTorch's script, however many tests ask."""
    return losses("python", 1, "language_model_plain")


@pytest.mark.slow  # an example; in the default run, others show that ranks equal one process
@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [("horovodrun-mpi", 2), ("python", 1), ("horovodrun-gloo", 2), ("mpirun", 3), ("torchrun", 2)],
)
def test_the_port_has_the_losses_of_plain_pytorch(launcher: str, ranks: int) -> None:
    plain = plain_losses()
    assert losses(launcher, ranks, "language_model") == pytest.approx(plain, rel=1e-5)
    assert plain[1] < plain[0] < 5.5  # it learns: a byte at random has log(256) = 5.5

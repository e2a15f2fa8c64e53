"""`trainer test`: two ranks sum, train and compare, or the line says what is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.harness import run_job
from trainer.cli import main

# Its sum is wrong on rank 1, as a broken transport's would be.
_WRONG_SUM = """\
import sys
import trainer.run
from trainer.cli import main
from trainer.ops import self_test

check = self_test._check

def wrong():
    import torch
    real = trainer.run.Run.all_reduce
    trainer.run.Run.all_reduce = lambda run, *given: real(run, *given) + run.rank
    return check()

self_test._check = wrong
sys.exit(main(["test"]))
"""


@pytest.mark.parametrize(
    "launcher",
    ["horovodrun", pytest.param("gloo", marks=pytest.mark.slow), pytest.param("torchrun", marks=pytest.mark.slow)],
)
def test_two_ranks_are_all_right(launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run_job("python", 1, ["-m", "trainer", "test", "--launcher", launcher])
    line = (
        r"trainer test: all right: 2 ranks on localhost, .+ over (MPI|Gloo): the sum is exact, 20 steps took the loss "
    )
    assert outcome.code == 0, outcome.output
    assert re.search(line, outcome.output), outcome.output
    assert not list(tmp_path.iterdir())


def test_a_wrong_sum_is_told(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(_WRONG_SUM)
    outcome = run_job("python", 1, [str(script)])
    assert outcome.code == 1, outcome.output
    assert "trainer test: the sum of 2^rank over 2 ranks is 4 on rank 1, not 3" in outcome.output


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--launcher", "mpiexec"], "launcher is 'mpiexec'; valid are horovodrun, mpi, gloo, torchrun"),
        (["-np", "0"], "np is 0; valid is a number of at least 1"),
        (["-np", "4", "-H", "a:1"], "np is 4, and the hosts 'a:1' have 1 slots"),
    ],
)
def test_a_mistake_is_one_line(options: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", *options]) == 2
    assert capsys.readouterr().err == f"trainer test: {line}\n"

"""What a person sees of a job: a bar on the terminal behind each launcher, whole lines above it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.distributed.harness import BIN, MARK, ROOT, command_for, kill_job, run_job
from tests.distributed.job_that_is_watched import EPOCHS, STEPS
from tests.screen import Screen, run_on_terminal

SCRIPT = ["-m", "tests.distributed.job_that_is_watched"]
LAUNCHERS = [
    "horovodrun-mpi",
    *[pytest.param(name, marks=pytest.mark.slow) for name in ("torchrun", "horovodrun-gloo", "mpirun", "python")],
]
RANK_MARK = re.compile(r"^(?:\[(?:1,)?\d\]<std(?:out|err)>:)?")


def printed(lines: list[str], ranks: int) -> None:
    """Check that what the ranks have printed stands there, each on a line of its own."""
    lines = [RANK_MARK.sub("", line) for line in lines]
    expected = [
        f"rank {rank} is at step {step}"
        for rank in range(ranks)
        for step in range(20, EPOCHS * STEPS * 2 // ranks + 1, 20)
    ]
    assert sorted(line for line in lines if "is at step" in line) == sorted(expected), "\n".join(lines)
    assert len([line for line in lines if re.match(r"epoch \d/2: loss 0\.\d{4}, ", line)]) == EPOCHS


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_bar_on_the_launchers_terminal_and_whole_lines_above_it(launcher: str, tmp_path: Path) -> None:
    ranks = 1 if launcher == "python" else 2
    environment = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", MARK: str(tmp_path), "PYTHONUNBUFFERED": "1"}
    try:
        session = run_on_terminal(
            command_for(launcher, ranks, SCRIPT), screen=Screen(120, 20), env=environment, cwd=ROOT, timeout_s=90
        )
    finally:
        kill_job(str(tmp_path))
    screen = session.screen
    assert session.code == 0, "\n".join(screen.text())
    bars = [line for line in screen.bottom_lines if re.match(r"epoch \d/2 +\d+%\|.*\| loss 0\.\d{4}, ", line)]
    assert {bar[:9] for bar in bars} == {"epoch 1/2", "epoch 2/2"}, "\n".join(screen.text())
    assert [line for line in screen.text() if "%|" in line] == []
    assert (screen.top, screen.bottom) == (0, screen.lines - 1)
    printed(screen.text(), ranks)


@pytest.mark.slow  # tests/unit/test_progress.py has the lines
@pytest.mark.parametrize("launcher", ["horovodrun-mpi", "torchrun"])
def test_without_a_terminal_there_are_lines(launcher: str) -> None:
    outcome = run_job(launcher, 2, SCRIPT)
    assert outcome.code == 0, outcome.output
    assert "%|" not in outcome.output
    assert "\x1b" not in outcome.output
    assert re.search(r"epoch 1/2  \d+/240  loss 0\.\d{4}  [\d,]+ samples/s  0:\d\d left\n", outcome.output)
    printed(outcome.output.splitlines(), 2)

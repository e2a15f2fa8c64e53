"""What a person sees of a job: a bar where rank 0's standard error is a terminal, lines elsewhere."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.distributed.harness import BIN, MARK, ROOT, command_for, kill_job, run_job
from tests.distributed.job_that_is_watched import EPOCHS, STEPS
from tests.terminal import run_on_terminal

SCRIPT = ["-m", "tests.distributed.job_that_is_watched"]
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


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("python", marks=pytest.mark.slow)])
def test_a_terminal_gets_a_bar(launcher: str, tmp_path: Path) -> None:
    environment = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", MARK: str(tmp_path), "PYTHONUNBUFFERED": "1"}
    command = command_for(launcher, 1 if launcher == "python" else 2, SCRIPT)
    try:
        session = run_on_terminal(command, env=environment, cwd=ROOT, timeout_s=90)
    finally:
        kill_job(str(tmp_path))
    assert session.code == 0, session.text
    bars = re.findall(
        r"\r(epoch \d/2): +\d+%\|.*?\| \d+/120 \[00:\d\d<00:\d\d, [ \d.]+ samples/s, loss 0\.\d{4}\]", session.text
    )
    assert set(bars) == {"epoch 1/2", "epoch 2/2"}, session.text


@pytest.mark.slow  # tests/unit/test_terminal.py has the lines of one rank
@pytest.mark.parametrize("launcher", ["horovodrun-mpi", "torchrun"])
def test_without_a_terminal_there_are_lines(launcher: str) -> None:
    outcome = run_job(launcher, 2, SCRIPT)
    assert outcome.code == 0, outcome.output
    assert "%|" not in outcome.output
    assert "\x1b" not in outcome.output
    line = r"epoch 1/2: +\d+% \d+/120 \[00:\d\d<00:\d\d, [ \d.]+ samples/s, loss 0\.\d{4}\]\n"
    assert re.search(line, outcome.output)
    printed(outcome.output.splitlines(), 2)

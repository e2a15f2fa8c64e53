"""The benchmark of how long a job takes to start, in a short form."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import startup
from benchmarks.startup import Start
from tests.distributed.harness import ROOT
from trainer import TrainerError


@pytest.mark.distributed
def test_a_short_run_prints_a_row_for_each_command() -> None:
    names = ["horovodrun --gloo, true", "horovodrun, first step"]
    command = [sys.executable, "-m", "benchmarks.startup", "--repeats", "1", "--dataset", "digits", "--only", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    cells = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines() if line.startswith("| h")]
    assert [row[1] for row in cells] == names
    launcher, first_step = (row[2:4] for row in cells)
    assert launcher[0] == "-"
    ready, ended = (float(cell.split()[0]) for cell in first_step)
    assert 0 < ready <= ended


def test_the_slowest_rank_counts() -> None:
    stdout = "startup-began: 100.5\nstartup-ready: 103.0\nstartup-ready: 102.0\nstartup-ended: 104.5\n"
    assert startup.read_start(stdout) == Start(ready_s=2.5, ended_s=4.0)
    assert startup.read_start("startup-began: 1.0\nstartup-ended: 1.5\n") == Start(ready_s=None, ended_s=0.5)


def test_a_command_that_fails_is_named() -> None:
    with pytest.raises(TrainerError, match=r"^a row: exit code 3: no$"):
        startup.measure("a row", ["sh", "-c", "echo no >&2; exit 3"])
